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
llm_ranks.py the ranks that divide the model of an offline program
ranks.py     computes each step on several ranks
replicas.py  reads the replicas of a model
shards.py    reads each rank's shards of a model
service.py   runs engines in threads for the server
protocol.py  the fields of the HTTP requests
chat.py      converts a chat request to a prompt, and a reply to a message
calls.py     the formats of tool calls, and their grammars
reply.py     divides a text into reasoning, content and tool calls
page.py      the page at `/`
app.py       the HTTP server
web.py       what the HTTP servers share
encoder.py   computes embeddings with a BERT
embedding.py  runs an encoder in a thread for the server
embedding_app.py  the HTTP server for embeddings
"""
