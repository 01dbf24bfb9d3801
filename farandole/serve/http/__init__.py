"""The HTTP servers: an OpenAI-compatible API for language models and encoders.

start.py        starts a server, and stops it on a signal
base.py         the common parts of the servers
completions.py  the server of a language model
embeddings.py   the server of an encoder
protocol.py     the fields of the requests
guard.py        API keys, and limits on request bodies
service.py      runs generation engines in threads
embedding_service.py  runs an encoder in a thread
answers.py      converts outputs to responses
chat.py         converts a chat request into a prompt, and a reply into a message
call_reader.py  reads a tool call as it arrives
calls.py        tool-call formats and their grammars
reply.py        splits a text into reasoning, content and tool calls
page.py, pages/ the page at `/`
stats.py        the state that the page shows
"""
