"""Error for bad data, and counts of bad records that ``data.skip_bad=true`` skips."""

import logging
from collections import Counter
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


class DataError(ValueError):
    """Error for unusable content of a file; the message names file and position."""


def one_line(error: object) -> str:
    """Return another library's error text on one line."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())


@dataclass
class BadRecords:
    """Counter of bad records by kind; unless ``skip`` is set, the first one raises."""

    skip: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    first: str | None = None  # message of the first bad record
    option: str = "data.skip_bad"  # key that enables skipping

    def report(self, kind: str, message: str, *, better: str | None = None) -> None:
        """Count a bad record. *Raises* DataError unless ``skip`` is set.

        ``better``: advice that the message gives before that of skipping.
        """
        if not self.skip and better:
            raise DataError(f"{message}; {better} (the last resort: {self.option}=true skips what is bad)")
        if not self.skip:
            raise DataError(f"{message} ({self.option}=true counts and skips what is bad)")
        if not self.counts[kind]:
            log.warning("skipping bad data (%s): %s", kind, message)
        self.counts[kind] += 1
        self.first = self.first or message

    def report_id(self, what: str, place: object, token: int, vocab_size: int) -> None:
        """Count or raise, as `report` does, a token id that is negative or beyond the vocabulary."""
        message = f"{place}: token id {token} is not below model.vocab_size={vocab_size}"
        better = (
            f"set model.vocab_size to the number of ids of its tokenizer, {token + 1} or more, or "
            "use the tokenizer that matches the model"
        )
        if token < 0:
            message = f"{place}: token id {token} is negative"
            better = "write the file again with unsigned or wider ids"
        self.report(f"{what} with a token id beyond the vocabulary", message, better=better)

    def merge(self, counts: dict[str, int], first: str | None) -> None:
        """Add another process's counts. *Raises* DataError if there are any and ``skip`` is unset."""
        if counts and not self.skip:
            raise DataError(f"{first} ({self.option}=true counts and skips what is bad)")
        self.counts.update(counts)
        self.first = self.first or first

    def log_total(self, what: str) -> None:
        if self.counts:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
            log.warning("%s: bad records skipped: %d (%s)", what, sum(self.counts.values()), kinds)
