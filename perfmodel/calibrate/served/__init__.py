"""Published serving results of any hardware as scenarios: MLPerf Inference, and tables of servers and offline jobs."""

__all__: list[str] = []
