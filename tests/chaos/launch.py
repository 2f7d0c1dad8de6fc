"""Represent a child to its supervisor: pass the pipes to the warm process, and end as the child ends.

This imports only a little of the standard library, because it is started for every attempt.
"""

import ctypes
import os
import signal
import socket
import struct
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    warm = socket.socket(socket.AF_UNIX)
    warm.connect(sys.argv[1])
    socket.send_fds(warm, [b"."], [0, 2])
    os.close(0)  # Only the child may read the pipe.
    answer = warm.recv(4)
    if len(answer) != 4:
        return 71
    (code,) = struct.unpack("<i", answer)
    if code < 0:
        os.kill(os.getpid(), -code)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
