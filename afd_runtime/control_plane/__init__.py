# SPDX-License-Identifier: Apache-2.0
"""Who is there, which step comes next, and who is gone: typed messages over zmq, on one watcher thread per process."""
