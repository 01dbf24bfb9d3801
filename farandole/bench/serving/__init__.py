"""Benchmark servers with an OpenAI-compatible API, and predict the speed of a server.

run.py      measures all scenarios
setup.py    the options of the benchmark
load.py     lengths and arrivals of requests
client.py   sends requests, and records when each part of a response arrives
limit.py    lower bounds on the times, from the weights, the memory bandwidth and the FLOP rate
results.py  statistics and the report
picture.py  plots latencies and the speed-up of concurrent requests
plan.py     predicts the speed of ranks that serve a model (`farandole plan --serve`)
speeds.py   measures the speeds of this machine for the prediction
plan_check.py  measures one rank, to check the prediction
"""
