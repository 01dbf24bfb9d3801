"""The benchmark of servers with OpenAI's interface, and the planner's measurements.

run.py      measures all scenarios
setup.py    the options
load.py     lengths and arrivals of requests
client.py   sends requests, and records when each part of a response arrives
limit.py    the shortest possible times, from weights, bandwidth and arithmetic
results.py  statistics and the report
picture.py  the picture
plan.py     predicts the speed of ranks that serve a model (`farandole plan --serve`)
speeds.py   measures the speeds of this machine for the prediction
plan_check.py  measures one rank, to check the prediction
"""
