"""A model checker for the scripts themselves: every interleaving of small histories.

The checked code is the product's own: the Lua scripts in the in-memory store, called by the classes
that workers, producers, trainers and janitors use. Only the processes are modelled: each is a small
state that starts operations. An operation (`operations.py`) is stopped behind each call of the
server, so that calls of different processes interleave in every order. Each call may be carried out
with its reply lost (and is then repeated), or arrive once more at any later time; each process may
die between any two calls, and a new one takes its name; the clock of the server may pass, jump, or be
set back. How often each of these may happen is the `Budget` of a history.

A state is the key space of the server and the state of each process (`world.py`). Two states that
differ only in names of tokens, ids of stream entries and a common shift of time are one
(`canonical.py`). With few processes and faults, the search ends; with more, it stops at a limit and
reports the depth up to which all was seen.

In each state, the invariants are checked against the key space (`state_invariants.py`); for each
call, what it may change (`call_invariants.py`), and that calling it again changes nothing (I13).
From a sample of the states the run is finished without further faults: every group must be trained
once, or have ended in another way (`finish.py`).

Not modelled: several tasks (I4), full servers and barred workers (I11, I12), receipts on a connection
of their own, groups that no worker made, loss of server data, order policies, clusters. `README.md` has
the figures.

    python -m proofs.model_check --minutes 5
    python -m proofs.model_check --stories
"""
