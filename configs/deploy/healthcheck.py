"""Health check of a container: exit code 0 if its role is ready, waiting for nothing but work.

`healthcheck.py 9470` asks `/readyz` at that port of its `metrics_endpoint`.
"""

from __future__ import annotations

import http.client
import sys

TIMEOUT_S = 2.0


def is_ready(port: int) -> bool:
    """Return whether the process that listens at this port of this machine says that it is ready.

    False if it does not answer within `TIMEOUT_S`.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):  # it has not begun to listen, or is none of ours
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(not is_ready(int(sys.argv[1])))
