"""Supervised fine-tuning on prompts and completions by the `SFTTrainer` of trl, with adapters."""

import argparse
import os

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from shardwright import whole
from shardwright.integrations.transformers import ShardwrightTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]


def words(start, end):
    return " ".join(WORDS[3 + number % 60] for number in range(start, end))


parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

set_seed(0)
vocabulary = models.WordLevel(
    {word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"
)
tokenizer = Tokenizer(vocabulary)
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
rows = [
    {"prompt": words(n, n + 4), "completion": " " + words(n + 4, n + 8 + n % 3)} for n in range(48)
]
config = LlamaConfig(vocab_size=len(WORDS), hidden_size=64, intermediate_size=128)
config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 2, 4, 2
config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 1, 1
arguments = SFTConfig(
    options.folder,
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=options.steps,
    lr_scheduler_type="constant",
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=3,
    pad_to_multiple_of=16,
    report_to="none",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)
trainer = type("Planned", (ShardwrightTrainer, SFTTrainer), {})(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step'] - 1}: loss {entry['loss']:.6f} norm {entry['grad_norm']:.6f}")
ids = tokenizer([rows[0]["prompt"]], return_tensors="pt")["input_ids"]
with whole(trainer.model) as model:
    print("output", model.generate(input_ids=ids, max_new_tokens=8, pad_token_id=0).tolist())
