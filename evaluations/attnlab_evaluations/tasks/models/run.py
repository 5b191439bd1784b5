"""One run of `attnlab models`. Needs transformers."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable

import torch

from attnlab import VariantUnavailable
from attnlab_evaluations.frame import records
from attnlab_evaluations.frame.progress import Progress
from attnlab_evaluations.tasks.models import report
from attnlab_evaluations.tasks.models.cells import Own, cell_of
from attnlab_evaluations.tasks.models.outcome import WRONG, Cell
from attnlab_evaluations.tasks.models.settings import ModelsSettings
from attnlab_evaluations.tasks.models.zoo import TINY


def run_models(settings: ModelsSettings, cell_of_variant: Callable[[Own, str], Cell] = cell_of) -> int:
    """Judge every cell and print the matrix: 0, 1 where a cell is wrong, 130 at Ctrl-C, which prints what was done by then."""
    if importlib.util.find_spec("transformers") is None:
        raise VariantUnavailable("models: transformers is not installed: pip install 'attnlab[transformers]'")
    cells, progress = [], Progress()
    try:
        with _quiet():
            for name in settings.models:
                own = Own(TINY[name])
                for variant in settings.variants:
                    progress.say(f"{name}: {variant}")
                    cells.append(cell_of_variant(own, variant))
    except KeyboardInterrupt:
        progress.done()
        if cells:
            print(report.text(cells, settings.form))
        print("interrupted", file=sys.stderr)
        return 130
    progress.done()
    words = report.text(cells, settings.form)
    print(words)
    if settings.write is not None:
        records.write_text(settings.write, words + "\n")
    return int(any(cell.status == WRONG for cell in cells))


class _quiet:
    """transformers warns of each implementation that it meets, and asks for compilers; a matrix of hundreds needs none of it."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.simplefilter("ignore")
        self.level, self.threads = logging.get_verbosity(), torch.get_num_threads()
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        torch.set_num_threads(1)  # models this small are slower with more

    def __exit__(self, *error: object) -> None:
        from transformers.utils import logging

        torch.set_num_threads(self.threads)
        logging.set_verbosity(self.level)
        self.warnings.__exit__(*error)  # type: ignore[arg-type]
