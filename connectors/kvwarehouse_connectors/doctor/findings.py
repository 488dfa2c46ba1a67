"""What the doctor says of one thing that it looked at, in the form of findings about a host."""

from __future__ import annotations

import kvwarehouse as kvw

Finding = kvw.host.Finding
Verdict = kvw.host.Verdict
fail, healthy, ok = kvw.host.fail, kvw.host.healthy, kvw.host.ok
skip, warn = kvw.host.skip, kvw.host.warn
