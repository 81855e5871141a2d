"""The logger of this package. It removes the secrets of URLs from every message."""

from __future__ import annotations

import logging

from ckpt_tools.errors import redacted

log = logging.getLogger("ckpt_tools")


class _Redacting(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redacted(record.getMessage()), None
        return True


log.addFilter(_Redacting())
