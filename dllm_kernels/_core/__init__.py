"""Row ops: one record per op, and the code that runs any record: eager, compiled, chunk by chunk, on one rank."""
