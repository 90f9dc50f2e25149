"""Fine-tuning with adapters of peft by the `Trainer` of transformers."""

import argparse
import os

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Sentences(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        ids = (index + torch.arange(24) * (1 + index % 5)) % 128
        return {"input_ids": ids, "labels": ids.clone()}


parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

set_seed(0)
config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
config.num_attention_heads, config.num_key_value_heads = 4, 2
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
model = get_peft_model(LlamaForCausalLM(config), lora)
arguments = TrainingArguments(
    options.folder,
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    gradient_accumulation_steps=2,
    max_steps=options.steps,
    lr_scheduler_type="constant",
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=3,
    report_to="none",
    use_cpu=not torch.accelerator.is_available(),
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Sentences())
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step'] - 1}: loss {entry['loss']:.6f} norm {entry['grad_norm']:.6f}")
ids = Sentences()[0]["input_ids"][None, :8]
print("output", trainer.model.generate(input_ids=ids, max_new_tokens=8, pad_token_id=0).tolist())
