"""The device."""


class current_platform:  # noqa: N801
    device_type = "cpu"

    @staticmethod
    def get_device_name():
        return "fake"
