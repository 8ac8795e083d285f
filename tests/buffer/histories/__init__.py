"""A run, a model of it that talks to no server, and every move that its actors can make:
`all_moves.AllMoves`.

After each move, server and model are compared: totals and bytes, all lines, pools (order and
scores), leases and dead letters; at the end every group, its tokens and tries, every batch, every
payload that stays. A broken invariant is seen by:

    I1   one stage             totals and lines after each move; fsck and `stages` of each group at the end
    I2   one owner             submit, release, heartbeat and reads of jobs that were lost: `submit_again`, `pick`
    I3   no prompt twice       enqueue's cursor; `enqueue_behind_the_cursor`, `producer_dies_before_it_enqueues`, `lose`
    I4   all or nothing        `take`, strict or not, of two tasks, one of them short
    I5   a batch is a record   `take_again`, with its masks; `quarantine`; all manifests at the end, also after `lose`
    I6   commit after          `restart_trainer…`, `trainer_dies_in_its_commit`, `take_a_wrong_step`; `lose`: a
         checkpoint            server that forgot what a checkpoint knows, a trainer that dies while it tells it
    I7   one of each role      `zombie_trainer`, `zombie_producer`, `change_producer`
    I8   never too stale       scores after each move, `take`, `refresh`, `set_staleness`, `trainer_dies_while_it_opens`
    I9   the stamp is true     lengths and versions of what is taken, exported and imported; scores come from the stamps
    I10  pause is a fact       claims while paused or with old weights: `pause`, `publish`, `claim`; `acknowledge…`
    I11  poison is contained   tries of each group; dead letters; `clock_steps`, `leases_run_out`, `fence`, `set_tries`
    I12  bounded bytes         bytes held after each move, `keep_turns`; `set_marks`; at the end, no payload that nobody names
    I13  repeated calls        any move may lose its replies: each script runs twice, and the key space stays as it was
    I14  payloads untouched    the bytes of every group are read at the end; tests/buffer/redis/test_scripts.py reads the Lua

Which lines of which script that is, one by one: tests/buffer/invariants, with a story for each. Two
of these no random history here can tell. That the oldest of several lineages counts (I9): in a
group of one rollout the first is always the oldest, since every fork after a lineage counts for all
before it. That poison counts against its worker (I11): people read that number, nothing depends on
it.
"""
