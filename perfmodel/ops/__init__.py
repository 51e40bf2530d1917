"""Operator work: FLOPs, bytes per memory level, messages. Pure functions of sizes, without times.

work, problem_sizes, messages   the result of an operator; `formats`, `sharding`: its input
linear, elementwise, collectives, attention, recurrent   operators, and the layers of one kind of mixer
feedforward, routing        feed-forward blocks, dense or mixtures of experts; which experts tokens go to
node, graphs                operators put together, up to the graph of a step"""

from perfmodel.ops.formats import served_model
from perfmodel.ops.graphs.step import StepGraph, build_graph
from perfmodel.ops.messages import Message
from perfmodel.ops.node import OperatorNode
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import BatchShape, Depends, Work, decode_shape, windowed_contexts
