"""Serve language models: requests join and leave a running batch at every step.

request.py     the parameters and the outputs of a request
engine.py      the generation engine: schedule, run, post-process
admission.py   limits the batch so that step times meet a target
runner.py      runs a model on tokens of many sequences
store.py       the KV cache of all running sequences: contiguous slots, or pages with shared prefixes
rows.py        matrix products and attention whose results do not depend on the other rows of a batch
elements.py    normalization, gated activations and rotary embeddings in the C core
sampling.py    draws the next tokens of all sequences
constraint.py  constrains the tokens to a schema, a regular expression or a grammar
threads.py     the threads that compute a step
text.py        converts tokens to text as they arrive, and finds stop strings
metrics.py     counters and histograms in Prometheus' text format
folder.py      reads a model, its tokenizer and its chat template from a folder
lora.py        reads the LoRA adapters that requests select
encoder.py     computes embeddings with a BERT model
llm.py         generates text offline
batch.py       generates text for the prompts in a file
speculation/   speculative decoding
ranks/         tensor parallelism, and replicas of a model
http/          the HTTP servers
"""
