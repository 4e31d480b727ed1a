"""Measurements and the training demo; ``python -m benchmarks`` lists them. Not part of the wheel."""

import os

# Read by the libraries under torch when it is first imported, hence here.
# Threads that wait sleep instead of spinning: beside other work on the same cores, spinning made the demo 5x slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The profiler announces its start and end on stderr at every measurement; 99 is above all its levels.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
