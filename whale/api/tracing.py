"""Recording chosen steps of a run: `trace.directory` gets trace.json for Perfetto, report.html, the picture of a step, and steps.json.

After each recorded step rank 0 gathers the recordings and rewrites the files, so that a run that ends early leaves what it has done.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter

from whale.comm import close_at_exit, compare_clocks, on_first_rank
from whale.config import Config
from whale.config.sections import TraceSettings
from whale.errors import ConfigError, warn
from whale.estimate import Costs, StepEstimate, estimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.serialization import to_json
from whale.ir.timeline import STEPS, StepRecording
from whale.runtime.execute.roster import Roster
from whale.runtime.recording.recorder import RankStep, Recorder, put_together

TRACE, REPORT = "trace.json", "report.html"


@dataclass
class Tracing:
    """The recording of a run.

    Attributes:
        directory: where it is written; made here.
        steps: which steps of this run are recorded, from 0; a run that resumes counts from where it does.
        recorder: of what happens on this rank.
        graph, cluster, config: what the step is predicted from.
        roster: who is who.
    """

    directory: Path
    steps: range
    recorder: Recorder
    graph: ModelGraph
    cluster: Cluster
    config: Config
    roster: Roster
    _recordings: list[StepRecording] = field(default_factory=list)
    _num_done: int = 0
    _last_end: float | None = None
    _seconds_before: float | None = None
    _is_closed: bool = False

    @staticmethod
    def of(config: Config, graph: ModelGraph, cluster: Cluster, roster: Roster) -> Tracing | None:
        """The recording that rank 0's settings ask for, on all ranks; None for none.

        Raises:
            ConfigError: the folder cannot be made.
        """
        world = roster.world
        trace = on_first_rank(world, lambda: _ready(config.trace))
        if trace.directory is None:
            return None
        steps = range(trace.first_step, trace.first_step + trace.num_steps)
        found = Tracing(Path(trace.directory), steps, Recorder(world.rank, world.device), graph, cluster, config, roster)
        close_at_exit(found)
        return found

    def begin(self) -> None:
        """Called by all ranks before each step; where it is recorded, they start it together."""
        if self._num_done in self.steps:  # again after one that failed
            if self._last_end is not None:  # the first batch of an update
                self._seconds_before, self._last_end = perf_counter() - self._last_end, None
            self.recorder.start(compare_clocks(self.roster.world))

    def end(self, step_number: int, num_rows: int) -> None:
        """Called by all ranks after each step.

        Raises:
            ConfigError: the files cannot be written.
        """
        self._num_done += 1
        if self._num_done - 1 in self.steps:
            own = replace(self.recorder.stop(), seconds_before=self._seconds_before)
            seen = [each for each in self.roster.world.gather_objects(own) if isinstance(each, RankStep)]
            on_first_rank(self.roster.world, lambda: self._write(step_number, num_rows, seen))
        self._last_end = perf_counter()

    def close(self) -> None:
        """Warns on rank 0 where nothing has been recorded."""
        if self.roster.world.rank == 0 and not self._recordings and not self._is_closed:
            warn(f"no step was recorded in {self.directory}: the run ended before step {self.steps.start + 1} (trace.first_step)")
        self._is_closed = True

    def give_way(self) -> None:
        """Lets another recording take its place."""
        self._is_closed = True

    def _write(self, step_number: int, num_rows: int, seen: list[RankStep]) -> None:
        from whale.report import recorded_run, report_html, trace_json  # needed where steps are recorded alone

        plan = self.roster.plan
        devices = dict(zip(self.roster.world_ranks, plan.devices, strict=True))
        self._recordings.append(put_together(step_number, num_rows, seen, devices))
        title = f"One step of a run on {plan.cluster}"
        pages = {
            TRACE: trace_json(plan, self._predicted, self._recordings),
            REPORT: report_html(plan, self.graph, self.cluster, self._predicted, self._recordings, title=title),
            STEPS: to_json(recorded_run(plan, self._predicted, self._recordings)),
        }
        try:
            for name, text in pages.items():
                (self.directory / name).write_text(text)
        except OSError as error:
            raise _unwritable(self.directory, error) from error

    @cached_property
    def _predicted(self) -> StepEstimate:
        return estimate(self.roster.plan, self.graph, self.cluster, Costs.for_model(self.config, self.graph, self.cluster))


def _ready(trace: TraceSettings) -> TraceSettings:
    if trace.directory is not None:
        make_folder(trace.directory)
    return trace


def make_folder(directory: str) -> None:
    """Makes the folder before the run; a ConfigError where it cannot be made."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error) from error


def _unwritable(directory: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot record steps in {directory}: {error.strerror}", hint="--trace or trace.directory names the folder")
