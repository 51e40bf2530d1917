"""Cost of work: time, memory, energy and money.

forms, calibrations   formulas of kernels and messages; the fits in them, their files and origin
operator_timer        one operator on one device
steps                 from operators to the step of a batch
memory, power         what a device holds; what it draws and costs"""

from perfmodel.cost.calibrations.calibration import DATASHEET, Calibration, HostFit, datasheet
from perfmodel.cost.calibrations.engine_profile import EngineProfile, ServerFit, load_engine_profile, profile_of
from perfmodel.cost.calibrations.files import load_calibration, save_calibration
from perfmodel.cost.kernel_models.device import OperatorTime, peak_flops_per_s, ridge_point
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.cost.memory.footprint import kv_bytes_per_token, state_bytes_per_sequence
from perfmodel.cost.memory.plan import MemoryPlan, plan_memory
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.cost.power import energy_j, energy_split_j, usd_per_hour, usd_per_million_tokens
from perfmodel.cost.steps.cost_model import GraphCostModel, StepCostModel
from perfmodel.cost.steps.explain import OperatorEstimate, StepEstimate
from perfmodel.cost.steps.host import Host, host_fit
from perfmodel.cost.steps.speculation import DraftTables, SpeculativeCostModel
from perfmodel.cost.steps.stages import StagedCostModel, StageTicks, estimate_step
from perfmodel.cost.steps.step_costs import StepCosts, scenario_drafts, scenario_fits, scenario_graph, step_costs
from perfmodel.cost.steps.tables import StepTables, Usage
