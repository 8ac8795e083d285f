"""Agent programs that only speak the OpenAI API, run unchanged: a local endpoint records what they
made the model say.

loop.py      the agent loop: one endpoint for each group, one session for each rollout
runner.py    starts the agent: a function by dotted path, or a program
server.py    the endpoint: HTTP, who may ask, streams
dialect.py   what all requests and answers have in common
chat_completion.py, text_completion.py   the two ways to ask
session.py   a conversation, or several, as tokens: what is trained
segment.py   one stretch of tokens that the model really had before it
verifiers_agent.py   environments of verifiers as agents
"""
