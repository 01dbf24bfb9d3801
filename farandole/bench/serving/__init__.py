"""The benchmark of servers with OpenAI's interface.

run.py      measures all scenarios
setup.py    the options
load.py     lengths and arrivals of requests
client.py   sends requests, and records when each part of an answer arrives
limit.py    the shortest possible times, from weights, bandwidth and arithmetic
results.py  statistics and the report
picture.py  the picture
"""
