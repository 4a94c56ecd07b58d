"""Several learner ranks on one machine, by torchrun's machinery, listening on loopback alone.

torchrun's usual rendezvous is a TCP store, which listens on every interface. Here launcher and
ranks meet through files in a private folder, and gloo and NCCL use the loopback interface.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import structlog
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from learner.model.ranks import RENDEZVOUS_FILE

log = structlog.get_logger()


def launch(arguments: list[str], *, ranks: int) -> int:
    """Run `python -m learner <arguments>` as `ranks` processes; the first failure's exit code.

    No rank is restarted alone: the supervisor of the launcher restarts all from the checkpoint.
    """
    folder = Path(tempfile.mkdtemp(prefix="nyala-ranks-"))
    os.environ.update(
        {
            RENDEZVOUS_FILE: str(folder / "ranks"),
            # Otherwise the launcher opens a TCP store for the ranks, on all interfaces.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / "launcher"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "learner", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        log.error("a rank failed", rank=rank, exit_code=failure.exitcode)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        log.info("stopped by a signal", signal=error.sigval.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0
