"""What can go wrong in a stockroom."""


class StockroomError(Exception):
    """Root of the errors below."""


class QuantityError(StockroomError):
    """A quantity cannot be read, or two of them cannot be added."""


class CatalogError(StockroomError):
    """A catalog file has a bad line."""

    def __init__(self, message: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(message if line is None else f"line {line}: {message}")


class OutOfStock(StockroomError):
    """More was asked for than there is."""
