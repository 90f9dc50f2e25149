"""The drawings of the documentation are made by the code that they explain."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_drawing_is_what_the_code_draws_and_stands_on_a_page(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "docs/figures", str(tmp_path)], cwd=ROOT, check=True)
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    kept = {file.name: file.read_text() for file in (ROOT / "docs/images").glob("*.svg")}
    assert drawn == kept, "make figures"
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert [name for name in kept if f"(images/{name})" not in pages] == []
