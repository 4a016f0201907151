"""A queue of runs for one or a few machines: priorities, quotas, preemption by checkpoint, restarts.

schedule.py and outcome.py decide, without side effects; store.py remembers; agent.py and runner.py have the processes of one
machine; server.py joins them; wire.py is how the commands of __main__.py reach it.
"""
