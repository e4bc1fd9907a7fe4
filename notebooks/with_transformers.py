"""The same arguments, the same text at temperature 0, and how much faster: transformers and this."""

import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from longspec_jax import LongSpec

TARGET = "lmsys/vicuna-7b-v1.5-16k"
DRAFT = "sail/longspec-vicuna-7b-v1.5-16k"
PROMPT = Path("report.txt").read_text()

config = GenerationConfig(max_new_tokens=64, do_sample=False)
inputs = AutoTokenizer.from_pretrained(TARGET)(PROMPT, return_tensors="pt")

model = AutoModelForCausalLM.from_pretrained(TARGET)
begin = time.perf_counter()
theirs = model.generate(**inputs, generation_config=config)
their_seconds = time.perf_counter() - begin

spec = LongSpec.from_pretrained(TARGET, DRAFT)
ours = spec.generate(inputs["input_ids"].numpy(), config)
our_seconds = ours.stats.prefill_seconds + ours.stats.decode_seconds

count = inputs["input_ids"].shape[1]
same = tuple(theirs[0, count:].tolist()) == ours.sequences[0]
print(f"the same tokens: {same}; {their_seconds / our_seconds:.1f} times as fast")
print(f"{ours.stats.acceptance_length:.2f} tokens per target pass")
