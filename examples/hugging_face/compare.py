"""Compare logits of an exported folder in transformers and here: python compare.py FOLDER TEXT"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import graphmoe

folder, text = sys.argv[1:]
tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
theirs, (_, ours) = AutoModelForCausalLM.from_pretrained(folder), graphmoe.load_hf(folder)
with torch.no_grad():
    expected, found = theirs(tokens).logits, ours(tokens)
error = float((found - expected).norm() / expected.norm())
print(f"{type(theirs).__name__}, {tokens.numel()} tokens: logits differ by {error:.1e}")
sys.exit(error > 1e-4)
