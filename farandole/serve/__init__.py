"""Serve language models: requests join and leave a running batch at every step.

engine.py    the generation engine: schedule, run, post-process
admission.py limits the batch so that measured step times meet a target
store.py     keys and values of all running sequences: contiguous slots, or pages with shared prefixes
rows.py      products and attention whose results do not depend on the other rows of a batch
sampling.py  draws the next tokens of all sequences
constraint.py  constrains the tokens to a schema, a regular expression or a grammar
text.py      converts tokens to text as they arrive, and finds stop strings
speculation.py  verifies several proposed tokens per step, where this pays
ngrams.py    proposes tokens from a sequence's own tokens
draft.py     proposes tokens with a draft model
lora.py      reads the LoRA adapters that requests select
folder.py    reads a model, its tokenizer and its chat template from a folder
llm.py       generates text offline
service.py   runs the engine in a thread for the server
protocol.py  the fields of the HTTP requests
app.py       the HTTP server
"""
