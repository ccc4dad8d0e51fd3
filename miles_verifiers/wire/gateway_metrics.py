"""The gateway's metrics in Prometheus' text format (version 0.0.4 of its exposition formats)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from miles_verifiers.wire.admission import Admission
from miles_verifiers.wire.core import Wire

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 240.0)
"""Seconds. Generation takes from a fraction of a second to minutes."""


class GatewayMetrics:
    """Counts answers by status, and the seconds of those to generate requests."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        self._seconds = [0] * (len(_BUCKETS) + 1)
        self._sum = 0.0
        self.gone = 0
        """Requests whose client went away."""

    def answered(self, path: str, status: int) -> None:
        self._answers[path, status] += 1

    def took(self, seconds: float) -> None:
        self._seconds[bisect_left(_BUCKETS, seconds)] += 1
        self._sum += seconds

    def as_text(self, wire: Wire, admission: Admission) -> str:
        counters, traffic = wire.counters, wire.client.traffic
        lines: list[str] = []

        def family(name: str, kind: str, text: str, *values: tuple[str, float]) -> None:
            lines.append(f"# HELP miles_verifiers_gateway_{name} {text}")
            lines.append(f"# TYPE miles_verifiers_gateway_{name} {kind}")
            lines.extend(f"miles_verifiers_gateway_{name}{labels} {value:g}" for labels, value in values)

        answers = [
            (f'{{path="{path}",status="{status}"}}', float(count))
            for (path, status), count in sorted(self._answers.items())
        ]
        family("responses_total", "counter", "HTTP answers.", *answers)
        family("clients_gone_total", "counter", "Requests whose client went away.", ("", self.gone))
        family("prompt_tokens_total", "counter", "Prompt tokens of good replies.", ("", counters.prompt_tokens))
        family("sampled_tokens_total", "counter", "Sampled tokens of good replies.", ("", counters.tokens))
        family("engine_requests_total", "counter", "Requests to engines, repeats included.", ("", traffic.attempts))
        family("engine_repeats_total", "counter", "Requests that were sent again.", ("", traffic.repeats))
        family("engine_aborts_total", "counter", "Requests that an engine was told to give up.", ("", traffic.aborts))
        family("requests_running", "gauge", "Requests that an engine works on.", ("", admission.running))
        family("requests_waiting", "gauge", "Requests that wait for their turn.", ("", admission.waiting))
        family("prompt_tokens_running", "gauge", "Their prompt tokens.", ("", counters.prompt_tokens_in_flight))
        family("draining", "gauge", "1 while the gateway shuts down.", ("", admission.draining))
        family("generate_seconds", "histogram", "Seconds from request to answer.")
        lines.extend(self._histogram("miles_verifiers_gateway_generate_seconds"))
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), self._seconds, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]
