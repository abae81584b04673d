"""Record what a real machine asks for, then answer another from the recording, with the server gone."""

from __future__ import annotations

import pytest

from forkyard import EgressPolicy

from .web import API, REACHABLE, web_daemon

pytestmark = pytest.mark.timeout(900)

WORK = f"""
set -e
curl -sS https://{API}/count; echo
curl -sS https://{API}/count; echo
curl -sS -d question https://{API}/headers | cut -c 1-10
curl -sS https://{API}/bytes | sha256sum
python3 -c 'import urllib.request; print(urllib.request.urlopen("https://{API}/").read())'
"""


def test_what_was_recorded_is_replayed_offline_and_the_rest_is_refused() -> None:
    with web_daemon() as (web, daemon), daemon.client() as fy:
        recording = REACHABLE.model_copy(update={"record": "run"})
        with fy.sandboxes.create(network=recording) as recorder:
            first = recorder.exec(WORK, timeout_s=240)
            assert first.exit_code == 0, (first, first.stderr, recorder.egress.list(tail=20))
        assert [one.exchanges for one in fy.recordings.list()] == [5]
        asked = len(web.requests)
        with fy.sandboxes.create(network=EgressPolicy(preset="evaluation", replay="run")) as replayer:
            again = replayer.exec(WORK, timeout_s=240)
            assert (again.exit_code, again.stdout) == (0, first.stdout), again.stderr
            refused = replayer.exec(f"curl -sS -w '%{{http_code}}' https://{API}/unknown", timeout_s=60)
            assert "403" in refused.stdout
            assert "not in the recording" in refused.stdout
            unknown = replayer.exec("curl -sS -m 20 https://elsewhere.test/", timeout_s=60)
            assert unknown.exit_code == 6  # there is no such name
            (asked_once, *_) = replayer.egress.list(kind="http", exec_id=again.exec_id)
            assert (asked_once.method, asked_once.name, asked_once.path) == ("GET", API, "/count")
            assert (asked_once.status, asked_once.verdict) == (200, "allowed")
            denied = [record.reason or "" for record in replayer.egress.list(verdict="denied")]
            assert any("not in the recording" in reason for reason in denied)
        assert len(web.requests) == asked
        with pytest.raises(Exception, match="no recording 'nothing'"):
            fy.sandboxes.create(network=EgressPolicy(replay="nothing"))
        assert [one.url for one in fy.recordings.show("run")][:2] == [f"https://{API}/count"] * 2
        fy.recordings.delete("run")
        assert fy.recordings.list() == []
