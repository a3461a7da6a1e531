"""Make a corpus and a tokenizer of text files: python collect.py FOLDER FILE ..."""

import json
import sys
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

folder, files = Path(sys.argv[1]), sys.argv[2:]
folder.mkdir(parents=True, exist_ok=True)
texts = [Path(file).read_text(encoding="utf-8") for file in files]
with open(folder / "text.jsonl", "w", encoding="utf-8") as corpus:
    for text in texts:
        corpus.write(json.dumps({"text": text}) + "\n")
tokenizer = ByteLevelBPETokenizer()
tokenizer.train_from_iterator(texts, vocab_size=1024, special_tokens=["<|endoftext|>"])
tokenizer.save(str(folder / "tokenizer.json"))
print(f"{len(texts)} documents, {tokenizer.get_vocab_size()} tokens in {folder}")
