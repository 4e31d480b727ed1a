"""Measurements and the training demo; ``python -m benchmarks`` lists them. Not part of the wheel."""

import os

# Set here, because the libraries below torch read these variables when torch is first imported.
# Idle threads sleep instead of spinning, because with other processes on the cores spinning made the demo 5x slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The profiler would log its start and end to stderr in every measurement; 99 is above all log levels.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
