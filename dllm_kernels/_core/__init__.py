"""Row ops: one record each, and what runs any of them: eager, compiled, a chunk at a time, on one rank."""
