"""`HardwareSpec`: declared facts of a device or system with sources, its network, and its hourly price.

No fitted factors. Prices are from hardware_specs/prices, or the scenario's own."""

import datetime
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag

from perfmodel.files import units
from perfmodel.files.base import CheckedSpec, FileName, Spec
from perfmodel.files.catalog import find_file, normal_name
from perfmodel.files.device_tables import named
from perfmodel.files.units import Bytes, NonNegativeFloat, PositiveFloat, PositiveInt, Seconds
from perfmodel.files.validation import load_spec
from perfmodel.specs.networks import DEFAULT_NETWORK, Link, find_network, list_networks

OWN = "given in the scenario"  # the source of prices that are the user's
PriceKind = Literal["on_demand", "reserved", "spot", "owned"]


class Price(Spec):
    """What an hour of one device costs.

    source, date: who says so, and when; a price of one's own (`OWN`) has no date
    kind:        on_demand; reserved for a term; spot, which may be taken away; owned: what it cost over its hours"""

    source: str
    date: datetime.date | None = None
    usd_per_hour: PositiveFloat
    kind: PriceKind | None = None
    is_unconfirmed: bool = False  # whether no list or quote at hand says so

    @property
    def origin(self) -> str:
        """`on demand, unconfirmed, Google Cloud price list, 2024-06-01`"""
        kind = None if self.kind is None else self.kind.replace("_", " ")
        parts = (kind, "unconfirmed" if self.is_unconfirmed else None, self.source, self.date)
        return ", ".join(str(part) for part in parts if part is not None)


class Grids(Spec):
    """Grids' gram of CO2 for a kilowatt-hour, by region, in `year`."""

    source: str
    licence: str
    year: int
    gco2_per_kwh: dict[str, PositiveFloat]


def listed_grids() -> Grids:
    """The list of grids."""
    return load_spec(Grids, find_file("prices", "grids"))


class Site(CheckedSpec):
    """What stands around the devices, as factors on their energy, and the grid.

    server_factor: a server's power over its devices'
    pue:           the building's power over its servers' (power usage effectiveness)
    gco2_per_kwh:  gram of CO2 of the grid's kilowatt-hour
    region:        a region of the list of grids, which has its gco2_per_kwh: a country's ISO 3166 code, or WORLD
    usd_per_kwh:   price of electricity, which owned devices pay"""

    server_factor: float = Field(default=1.0, ge=1.0, le=3.0)
    pue: float = Field(default=1.0, ge=1.0, le=3.0)
    gco2_per_kwh: NonNegativeFloat | None = None
    region: str | None = None
    usd_per_kwh: NonNegativeFloat | None = None

    def _conflicts(self) -> Iterator[str]:
        if self.region is not None and self.gco2_per_kwh is not None:
            yield f"got region {self.region} and gco2_per_kwh {self.gco2_per_kwh:g}; expected one of them"
        elif self.region is not None and self.region not in (known := listed_grids().gco2_per_kwh):
            yield f"got region {self.region!r}; expected one of {', '.join(known)}; give others as gco2_per_kwh"

    @property
    def factor(self) -> float:
        """The building's power over its devices'."""
        return self.server_factor * self.pue

    @property
    def grid_gco2_per_kwh(self) -> float | None:
        """Gram of CO2 of a kilowatt-hour: as given, or the region's; None without either."""
        return self.gco2_per_kwh if self.region is None else listed_grids().gco2_per_kwh[self.region]


# Which of the two is asked by what is given, so that an error is about that one.
_Prices = Annotated[
    Annotated[PositiveFloat, Tag("all")] | Annotated[dict[str, PositiveFloat], Tag("each")],
    Discriminator(lambda given: "each" if isinstance(given, dict) else "all"),
]


def _by_own_names(given: float | dict[str, float]) -> float | dict[str, float]:
    """Normalise h100 to h100-sxm-80gb, also before a slice's profile; paths stay."""
    if not isinstance(given, dict):
        return given
    split = [(name.partition(":"), usd) for name, usd in given.items()]
    return {(card.name if (card := named(head)) else head) + sep + profile: usd for (head, sep, profile), usd in split}


_PricesByDevice = Annotated[_Prices, AfterValidator(_by_own_names)]
_Share = Annotated[float, Field(ge=0, le=1)]


def _usd_of(given: float | dict[str, float] | None, device: "HardwareSpec") -> float | None:
    """USD `given` for all devices alike, or for `device` by name; a slice costs its share of its card unless named."""
    if not isinstance(given, dict) or device.name in given:
        return given[device.name] if isinstance(given, dict) else given
    usd_of_card = given.get(device.card)
    return None if usd_of_card is None else usd_of_card * device.share_of_card


HOURS_PER_YEAR = 365.25 * 24
SLICES_OF_A_CARD = 7, 8  # of compute and memory, with MIG


class Reserved(Spec):
    """Devices rented for a term.

    share:    of all devices
    discount: on the price of an hour, as a fraction"""

    share: _Share
    discount: _Share


class Spot(Reserved):
    """Devices that may be taken away.

    share:       of all devices
    discount:    on the price of an hour, as a fraction
    interruptions_per_hour: of one device
    restart_s:   after each, in which it is paid for and idle
    lost_work_s: after each, in which it repeats what was in hand"""

    interruptions_per_hour: NonNegativeFloat
    restart_s: Annotated[Seconds, Field(ge=0)]
    lost_work_s: Annotated[Seconds, Field(ge=0)] = 0.0

    @property
    def capacity_factor(self) -> float:
        """Work of a paid hour over that of an hour without interruptions."""
        return 1 / (1 + self.interruptions_per_hour * (self.restart_s + self.lost_work_s) / 3600)


class Owned(Spec):
    """What a bought device costs beside its electricity, which `site` has.

    purchase_usd:  of one device with its share of the server, of all alike or of each by its name
    years:         over which it loses its value, in equal parts
    residual_share: what is left of the purchase price after these
    upkeep_share_per_year: staff, hosting, repairs: share of the purchase price per year"""

    purchase_usd: _PricesByDevice
    years: PositiveFloat
    residual_share: _Share = 0.0
    upkeep_share_per_year: NonNegativeFloat = 0.0

    def usd_per_hour(self, device: "HardwareSpec") -> float | None:
        """USD per hour of `device`, in use or not; None without a purchase price."""
        usd = _usd_of(self.purchase_usd, device)
        yearly = (1 - self.residual_share) / self.years + self.upkeep_share_per_year
        return None if usd is None else usd * yearly / HOURS_PER_YEAR


class ApiPrice(Spec):
    """What a provider asks for the same tokens.

    usd_per_million_input_tokens:  input tokens
    usd_per_million_cached_input_tokens: those found in a prefix cache; as the others unless given
    usd_per_million_output_tokens: output tokens"""

    usd_per_million_input_tokens: NonNegativeFloat
    usd_per_million_cached_input_tokens: NonNegativeFloat | None = None
    usd_per_million_output_tokens: NonNegativeFloat

    def usd(self, computed: int, cached: int, outputs: int) -> float:
        """USD of so many computed and cached input tokens and output tokens."""
        price, cached_price = self.usd_per_million_input_tokens, self.usd_per_million_cached_input_tokens
        inputs = price * computed + (price if cached_price is None else cached_price) * cached
        return (inputs + self.usd_per_million_output_tokens * outputs) / 1e6


class PriceOverride(CheckedSpec):
    """Prices in place of those of the list, and what renting is compared with.

    usd_per_gpu_hour: of all devices alike, or of each by its name; a device without one keeps that of the list
    kind:        of these prices, for the answer to name
    reserved:    devices rented for a term; those that are neither reserved nor spot cost the price itself
    spot:        devices that may be taken away
    owned:       the same deployment bought, to compare with
    api:         the same tokens from a provider, to compare with"""

    usd_per_gpu_hour: _PricesByDevice | None = None
    kind: PriceKind | None = None
    reserved: Reserved | None = None
    spot: Spot | None = None
    owned: Owned | None = None
    api: ApiPrice | None = None

    def _conflicts(self) -> Iterator[str]:
        shares = [part.share for part in (self.reserved, self.spot) if part is not None]
        if sum(shares) > 1 + 1e-9:
            yield f"got shares of {' and '.join(map('{:g}'.format, shares))}; expected reserved and spot of at most 1"

    def price_of(self, device: "HardwareSpec") -> Price | None:
        """The given price of `device` without discounts; None where the list's holds."""
        given, usd = self.usd_per_gpu_hour, _usd_of(self.usd_per_gpu_hour, device)
        is_share = isinstance(given, dict) and device.name not in given
        source = f"{OWN}; {device.share_of_card:.3g} of {device.card}" if is_share else OWN
        return None if usd is None else Price(source=source, usd_per_hour=usd, kind=self.kind)

    def mixed(self, price: Price) -> Price:
        """The mean of reserved, spot and other devices whose hour costs `price` without discounts."""
        if self.reserved is None and self.spot is None:
            return price
        parts, rest, factor = [], 1.0, 0.0
        for name, part in (("reserved", self.reserved), ("spot", self.spot)):
            if part is not None:
                capacity = part.capacity_factor if isinstance(part, Spot) else 1.0
                rest, factor = rest - part.share, factor + part.share * (1 - part.discount) / capacity
                parts.append(f"{part.share:.0%} {name}")
        source = f"{price.source}; mean of {', '.join([*parts, f'{max(rest, 0.0):.0%} at {price.usd_per_hour:g} USD'])}"
        usd = price.usd_per_hour * (factor + max(rest, 0.0))
        return price.model_copy(update={"usd_per_hour": usd, "source": source, "kind": None})


class _PriceList(Spec):
    """prices: of devices by their names."""

    prices: dict[str, Price]


def listed_prices() -> dict[str, Price]:
    """The list, by device."""
    return load_spec(_PriceList, find_file("prices", "prices")).prices


def listed_price(device: str) -> dict[str, Any]:
    """List price as in a hardware file; empty if not listed."""
    price = listed_prices().get(device)
    return {} if price is None else price.model_dump(exclude_defaults=True)


_ANY_NUMBER = 1 << 20
_SCALE_OUT = "scale_out"  # the name of a link between nodes in a hardware file
_LATENCY_S = 5e-6  # of a network given without one: that of the files with RDMA

# What code can rely on, beyond plain fp32. CPUs: as the compiler calls it; `amx` and `sme` are matrix units, as is
# Apple's own `apple_amx`. GPUs: `dp4a` sums four products of int8 in one instruction, `matrix` stands for tensor cores
# (NVIDIA), WMMA (RDNA 3 on), MFMA (CDNA), XMX (Intel); `simdgroup_matrix` (Metal) runs on the vector units.
_X86 = Literal["sse4", "avx", "avx2", "avx512", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx"]
_OtherCpus = Literal["neon", "dotprod", "i8mm", "bf16", "sve", "sme", "apple_amx", "rvv"]
Instruction = Literal[_X86, _OtherCpus, "dp4a", "matrix", "simdgroup_matrix"]


class MemoryLevel(Spec):
    """One level of the memory hierarchy; with `per: compute_unit`, capacity and bandwidth are those of one unit.

    bus_width_bits:  of the outermost level, all stacks or channels together (a CPU's channel has 64 bits)
    transfers_per_s: of one wire of the bus: 21e9 of GDDR6X at 21 Gbit/s, 4.8e9 of DDR5-4800
    device_share:    of the capacity, what the system lets the device have without being asked"""

    level: str  # hbm (the outermost, whatever its technology) | l3 | l2 | sram | tensor_memory | registers
    capacity_bytes: Bytes = Field(gt=0)
    visible_bytes: Bytes | None = Field(default=None, gt=0)  # what the driver lets a process see, where it is known
    bandwidth_bytes_per_s: units.BytesPerSecond | None = Field(default=None, gt=0)
    per: Literal["device", "compute_unit"] = "device"
    technology: str | None = None  # HBM3, GDDR6 ECC, DDR5-4800 ...
    inline_ecc: bool = False  # check bits lie in the same memory: for 16 bytes of data a 17th travels with them
    bus_width_bits: PositiveInt | None = None
    transfers_per_s: units.Hertz | None = Field(default=None, gt=0)
    unified: bool = False  # the one memory of an integrated GPU and its CPU
    device_share: PositiveFloat = Field(default=1.0, le=1)


class MigProfile(Spec):
    """A slice of a GPU (NVIDIA's multi-instance GPU), of whose memory, L2 and bandwidth it has `memory_slices` eighths.

    visible_bytes: of its memory; a share of the GPU's unless given"""

    compute_units: PositiveInt
    memory_slices: Annotated[int, Field(ge=1, le=8)]
    visible_bytes: Bytes | None = Field(default=None, gt=0)


class Declared(CheckedSpec):
    """The vendor's dense peak figures.

    mig: slices by profile (3g.40gb), each a device called NAME:PROFILE"""

    source: str
    architecture: str | None = None  # ampere | hopper | ada | blackwell | cdna3 ... : siblings share achieved fractions
    compile_target: str | None = None  # what compilers call the instruction set: sm_90 (CUDA guide, appendix), gfx942
    compute_units: PositiveInt  # a CPU's cores, of all kinds
    performance_cores: PositiveInt | None = None  # of them the large ones, where there are two kinds
    instructions: tuple[Instruction, ...] = ()
    clock_hz: units.Hertz = Field(gt=0)
    peak_flops_per_s: dict[str, Annotated[units.FlopsPerSecond, Field(gt=0)]] = Field(min_length=1)
    # Non-tensor fp32 rate, where it differs from peak_flops_per_s.fp32
    vector_flops_per_s: units.FlopsPerSecond | None = Field(default=None, gt=0)
    exponentials_per_clock: PositiveFloat = 16.0  # of a compute unit; the default is that of GPUs (CUDA C++ guide)
    sparsity_speedup: PositiveFloat = 1.0  # of 2:4 sparse products over dense ones
    sparsity_speedups: dict[str, PositiveFloat] = Field(default={})  # of formats in which it is another
    memory: tuple[MemoryLevel, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    tdp_w: PositiveFloat | None = None
    idle_w: NonNegativeFloat | None = None
    max_devices: PositiveInt = 8  # in one scale-up domain
    # Paths inside this block (`clock_hz`, `memory.l2.bandwidth_bytes_per_s`, `links.pcie.latency_s`) of what was
    # recalled, derived or taken as a default, not read in a vendor's document.
    unconfirmed: tuple[str, ...] = ()
    mig: dict[str, MigProfile] = Field(default={})

    def _conflicts(self) -> Iterator[str]:
        if self.idle_w is not None and self.tdp_w is not None and self.idle_w > self.tdp_w:
            yield f"got idle_w {self.idle_w:g} above tdp_w {self.tdp_w:g}; lower the first"


class GivenLink(Spec):
    """A link of the hardware file, the scale-up link unless given, or a network of hardware_specs/networks; another
    name needs a bandwidth.

    bandwidth_bytes_per_s: one way, per device; the hardware file's unless given"""

    link: str | None = None
    bandwidth_bytes_per_s: units.BytesPerSecond | None = Field(default=None, gt=0)
    latency_s: Seconds | None = Field(default=None, ge=0)  # from request to first byte; the link's own unless given

    def link_of(self, hardware: "HardwareSpec") -> Link:
        """The link on `hardware`. Raises ValueError for an unknown one."""
        declared = hardware.scale_up_link if self.link is None else hardware.link(self.link) or find_network(self.link)
        if declared is None and self.bandwidth_bytes_per_s is None:
            known = ", ".join(link.name for link in hardware.declared.links) or "none"
            raise ValueError(
                f"{hardware.name} has no link {self.link or 'at all'} (its links: {known}), and no network is "
                f"called so ({', '.join(list_networks())}); name one of them, or give bandwidth_bytes_per_s"
            )
        given = {"bandwidth_bytes_per_s": self.bandwidth_bytes_per_s, "latency_s": self.latency_s}
        update = {name: value for name, value in given.items() if value is not None}
        if declared is not None:
            return declared.model_copy(update=update)
        return Link.model_validate({"name": self.link or "link", **update})


class NetworkSpec(GivenLink):
    """The network between nodes, and the nodes.

    link:                  of hardware_specs/networks, or a name of one's own with a bandwidth; unless given the
                           hardware file's `scale_out` link, or DEFAULT_NETWORK
    latency_s:             of one hop of a collective, 5 us where neither a file nor a scenario says
    bandwidth_bytes_per_s: one way, of one network card (port)
    nics_per_node:         network cards of a node, which its devices share evenly; one for each device unless given"""

    devices_per_node: PositiveInt | None = None  # of those that the scale-up link can join, which is all unless given
    nics_per_node: PositiveInt | None = None

    def is_assumed(self, hardware: "HardwareSpec") -> bool:
        is_given = self.link is not None or self.bandwidth_bytes_per_s is not None
        return not is_given and hardware.link(_SCALE_OUT) is None

    def share_of(self, hardware: "HardwareSpec") -> Link:
        """One device's share of the network when its whole node communicates. Raises ValueError for an unknown link."""
        most = hardware.declared.max_devices
        if self.devices_per_node is not None and self.devices_per_node > most:
            raise ValueError(
                f"got devices_per_node={self.devices_per_node}; the scale-up link of {hardware.name} joins {most} at "
                f"most (max_devices in its file), give that or fewer"
            )
        name = self.link or ("network" if self.bandwidth_bytes_per_s is not None else _SCALE_OUT)
        link = DEFAULT_NETWORK if self.is_assumed(hardware) else name
        port = self.model_copy(update={"link": link}).link_of(hardware)
        update: dict[str, float] = {}
        if self.latency_s is None and not port.latency_s:
            update["latency_s"] = _LATENCY_S
        if self.nics_per_node is not None:
            share = self.nics_per_node / hardware.devices_per_node
            update["bandwidth_bytes_per_s"] = share * port.bandwidth_bytes_per_s
        return port.model_copy(update=update) if update else port


class HostSpec(Spec):
    """The machine around the devices.

    cores: of its CPU, which all processes of a replica share (a container's limit)"""

    cores: PositiveInt


class HardwareSpec(CheckedSpec):
    """One device type, as its file in `hardware_specs/` declares it.

    power_cap_w: what the device is allowed to draw (`nvidia-smi -pl`); its TDP unless given, which no file does
    network:     what joins its nodes, and how many devices a node has; a scenario's `cluster.network`, if that is given
    host:        cores that processes wait for; unless given, each process has its own
    """

    name: FileName
    kind: Literal["gpu", "cpu", "tpu", "npu", "fpga"]
    maker: str | None = None  # nvidia | amd | intel | apple | google ...: what lists are filtered by
    aliases: tuple[str, ...] = ()
    declared: Declared
    price: Price | None = None
    power_cap_w: PositiveFloat | None = None
    network: NetworkSpec | None = None
    host: HostSpec | None = None
    _slices_of_card: tuple[int, int] = PrivateAttr(SLICES_OF_A_CARD)

    def _conflicts(self) -> Iterator[str]:
        if self.declared.memory[0].bandwidth_bytes_per_s is None:
            yield "declared.memory.0 (the outermost level) needs bandwidth_bytes_per_s"

    def is_called(self, name: str) -> bool:
        """Whether `name` is the file's name or an alias."""
        return normal_name(name) in map(normal_name, (self.name, *self.aliases))

    @property
    def is_slice(self) -> bool:
        """Whether it is a slice of a device."""
        return ":" in self.name

    @property
    def card(self) -> str:
        """The device that it is, or is a slice of."""
        return self.name.partition(":")[0]

    @property
    def slices_of_card(self) -> tuple[int, int]:
        """How many of its card's compute and memory slices it takes."""
        return self._slices_of_card

    @property
    def share_of_card(self) -> float:
        """What it costs of its card: 1 of a whole device."""
        return max(own / whole for own, whole in zip(self._slices_of_card, SLICES_OF_A_CARD, strict=True))

    def sliced(self, profile: str) -> "HardwareSpec":
        """Its slice of this MIG `profile`: shares of compute units and memory, no link to other slices; power and price
        by the larger of its shares of seven compute and eight memory slices. Raises ValueError for an unknown one."""
        own, known = self.declared, self.declared.mig
        if profile not in known:
            names = f"expected one of {', '.join(known)}" if known else "its file has no MIG profiles; use all of it"
            raise ValueError(f"got the slice {profile} of {self.name}; {names}")
        part = known[profile]
        slices = int(profile.partition("g")[0]), part.memory_slices
        units, memory = part.compute_units / own.compute_units, slices[1] / SLICES_OF_A_CARD[1]
        cost = max(slices[0] / SLICES_OF_A_CARD[0], memory)

        def level(one: MemoryLevel) -> MemoryLevel:
            names = ("capacity_bytes", "visible_bytes", "bandwidth_bytes_per_s", "bus_width_bits")
            values = ((name, getattr(one, name)) for name in names)
            scaled = {name: type(value)(value * memory) for name, value in values if value is not None}
            if one is own.memory[0] and part.visible_bytes is not None:
                scaled["visible_bytes"] = part.visible_bytes
            return one.model_copy(update=scaled) if one.per == "device" else one

        power = {name: value * cost for name in ("tdp_w", "idle_w") if (value := getattr(own, name)) is not None}
        declared = own.model_copy(
            update=power
            | {
                "source": f"{own.source}; MIG {profile}",
                "compute_units": part.compute_units,
                "peak_flops_per_s": {name: peak * units for name, peak in own.peak_flops_per_s.items()},
                "vector_flops_per_s": None if own.vector_flops_per_s is None else own.vector_flops_per_s * units,
                "memory": tuple(map(level, own.memory)),
                "links": tuple(
                    link.model_copy(update={"peer_to_peer": False}) for link in own.links if link.name == "pcie"
                ),
                "max_devices": 1,
                "mig": {},
            }
        )
        price, share = self.price, {"aliases": (), "name": f"{self.name}:{profile}", "declared": declared}
        if price is not None:
            usd, source = price.usd_per_hour * cost, f"{price.source}; {cost:.3g} of {self.name}"
            share["price"] = price.model_copy(update={"usd_per_hour": usd, "source": source})
        result = self.model_copy(update=share)
        result._slices_of_card = slices
        return result

    @property
    def memory_bytes(self) -> float:
        """Capacity of the outermost level."""
        return self.declared.memory[0].capacity_bytes

    @property
    def memory_bandwidth(self) -> float:
        """Outermost memory bandwidth, byte/s."""
        bandwidth = self.declared.memory[0].bandwidth_bytes_per_s
        assert bandwidth is not None  # the validator refused the file otherwise
        return bandwidth

    @property
    def data_bandwidth(self) -> float:
        """Outermost bandwidth for data, byte/s: without inline ECC bits."""
        return self.memory_bandwidth * (16 / 17 if self.declared.memory[0].inline_ecc else 1.0)

    @property
    def visible_memory_bytes(self) -> float:
        """Allocatable bytes of the outermost memory.

        Vendors round: an "80 GB" A100 shows 81,920 MiB (85.9e9 bytes), an L40S of "48 GB" loses a sixteenth to ECC.
        Without a figure: the device's share of declared capacity."""
        outermost = self.declared.memory[0]
        return outermost.visible_bytes or outermost.capacity_bytes * outermost.device_share

    def level(self, name: str) -> MemoryLevel | None:
        """Memory level by name, or None."""
        return next((m for m in self.declared.memory if m.level == name), None)

    def link(self, name: str) -> Link | None:
        """Link by name, or None."""
        return next((link for link in self.declared.links if link.name == name), None)

    @property
    def devices_per_node(self) -> int:
        """Devices joined by the scale-up link: the maximum, or a node's; ranks without a link (CPU) share a node."""
        given = self.network.devices_per_node if self.network is not None else None
        return given or (self.declared.max_devices if self.declared.links else _ANY_NUMBER)

    @property
    def network_link(self) -> Link:
        """A device's share of the inter-node network; see `NetworkSpec`. Raises ValueError for an unknown link."""
        return (self.network or NetworkSpec()).share_of(self)

    @property
    def scale_up_link(self) -> Link | None:
        """Fastest link to siblings: scale-up fabric, else PCIe."""
        return max(self.declared.links, key=lambda link: link.bandwidth_bytes_per_s, default=None)
