"""Rows that mean nothing: refused, or skipped and counted as far as a budget goes."""


class BadRows:
    """Counts the rows that cannot be used, and refuses the first one beyond its budget."""

    def __init__(self, budget: int, option: str = "--config.data.max_bad_rows"):
        """Begin with none.

        Args:
          budget: how many may be skipped.
          option: what is typed to change that.
        """
        self.count, self.first = 0, ""
        self._budget, self._option = budget, option

    def add(self, place: str, error: ValueError) -> None:
        """Take note of a row.

        Args:
          place: ``line 7 of data.jsonl``.
          error: what is wrong with it.

        Raises:
          ValueError: if there are more of them than may be skipped.
        """
        self.count += 1
        self.first = self.first or f"{place}: {error}"
        if self.count <= self._budget:
            return
        if self._budget:
            raise ValueError(
                f"more rows than {self._option}={self._budget} cannot be used, the "
                f"first is {self.first}; repair or remove them, or raise the number"
            )
        raise ValueError(
            f"{self.first}; repair or remove the row, or skip so many of them with "
            f"{self._option}=NUMBER"
        )

    def summary(self) -> str:
        """How many were skipped and which was the first; empty if there was none."""
        rows = "row that cannot" if self.count == 1 else "rows that cannot"
        return f"skipped {self.count} {rows} be used, the first is {self.first}" * bool(self.count)
