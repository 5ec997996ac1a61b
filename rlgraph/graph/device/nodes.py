"""Graphs built node by node: children, bodies that run while or if a value holds, and launches by a kernel."""

import ctypes
import functools
import weakref
from typing import Any

import torch

from rlgraph.errors import GraphError
from rlgraph.graph.bindings import call, load, node_of

CONDITIONAL_NODES, DEVICE_LAUNCH = 12040, 12000  # CUDA 12.4 and 12.0, the first versions with them
NEVER = 2**63 - 1  # iterations
# When a decision is made, see RUNS.
AS_IF, BEFORE_LOOP, AFTER_ITERATION = range(3)
# How a kernel launches a graph, by the streams of those names: after the graph that the kernel is in, or beside it.
TAIL, FIRE_AND_FORGET = 0x0100000000000000, 0x0200000000000000
# Kernels of one thread that decide whether a body runs, and see to it. Each is compiled for one architecture: PTX would
# have to be linked first. What they call is the driver's own, which it links as it loads them.
RUNS = b"""
__device__ bool runs(const void* predicate, int bytes, long long* iterations, long long most, int when) {
    bool holds = bytes == 1 ? *(const unsigned char*)predicate != 0 : *(const int*)predicate != 0;
    long long done = when == 2 ? *iterations + 1 : 0;
    bool again = holds && done < most;
    *iterations = when == 0 ? again : done;
    return again;
}
"""
SET_CONDITION = (
    RUNS
    + b"""
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(unsigned long long, unsigned int);

extern "C" __global__ void decide(unsigned long long handle, const void* predicate, int bytes, long long* iterations,
                                  long long most, int when) {
    cudaGraphSetConditional(handle, runs(predicate, bytes, iterations, most, when));
}
"""
)
# A graph at 0 is the one that the kernel is in.
LAUNCH = (
    RUNS
    + b"""
extern "C" __device__ __cudart_builtin__ int cudaGraphLaunch(unsigned long long, unsigned long long);

extern "C" __global__ void decide(unsigned long long graph, const void* predicate, int bytes, long long* iterations,
                                  long long most, int when, unsigned long long stream, int* error) {
    *error = 0;
    if (!runs(predicate, bytes, iterations, most, when)) return;
    if (graph == 0) asm volatile("mov.u64 %0, %%current_graph_exec;" : "=l"(graph));
    *error = cudaGraphLaunch(graph, stream);
}
"""
)
# Why CUDA does not instantiate a graph, by cudaGraphInstantiateResult's names, without their prefix.
REFUSALS = {
    "InvalidStructure": "its structure is not allowed",
    "NodeOperationNotSupported": "it holds what is not allowed",
    "MultipleDevicesNotSupported": "its nodes are not all of one device",
}


class Handmade:
    """A graph built node by node on the current device, each node after the one before it; launched as one."""

    def __init__(self):
        self._runtime = load()[0]
        self.graph = call(self._runtime, "cudaGraphCreate", 0)
        weakref.finalize(self, self._runtime.cudaGraphDestroy, self.graph).atexit = False
        self._executable = None

    def instantiate(self) -> None:
        """Make it launchable, when all its nodes are there."""
        self._keep(call(self._runtime, "cudaGraphInstantiate", self.graph, 0))

    def instantiate_for_kernels(self) -> int:
        """Make it launchable by kernels, and take it to the device. Returns its address, as kernels know it."""
        params = self._runtime.cudaGraphInstantiateParams()
        params.flags = int(self._runtime.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagDeviceLaunch)
        try:
            self._keep(call(self._runtime, "cudaGraphInstantiateWithParams", self.graph, params))
        except GraphError as error:
            raise GraphError(f"{error}: {_refusal(params)}") from error
        call(self._runtime, "cudaGraphUpload", self._executable, self._stream())
        torch.cuda.current_stream().synchronize()  # other streams may launch it
        return int(self._executable)

    def launch(self) -> None:
        """On the current stream."""
        call(self._runtime, "cudaGraphLaunch", self._executable, self._stream())

    def _keep(self, executable: Any) -> None:
        self._executable = executable
        weakref.finalize(self, self._runtime.cudaGraphExecDestroy, executable).atexit = False

    def _stream(self) -> Any:
        return self._runtime.cudaStream_t(init_value=torch.cuda.current_stream().cuda_stream)


def _refusal(params: Any) -> str:
    """In words: why CUDA does not make a graph launchable by kernels, and for which node."""
    runtime, driver = load()
    result = runtime.cudaGraphInstantiateResult(int(params.result_out)).name.removeprefix("cudaGraphInstantiate")
    node = ""
    if int(params.errNode_out):
        found = node_of(runtime, driver, runtime.cudaGraphNode_t(init_value=int(params.errNode_out)))
        node = f", at a node of kind {found.kind} {found.name}".rstrip()
    why = REFUSALS.get(result, result)
    return f"{why}{node}; a graph that kernels launch may hold kernels, copies and fills, all of one device"


def add_child(graph: Any, after: Any, child: int) -> Any:
    """Add a copy of a captured graph. `after` is a node, or None; so is what is returned."""
    runtime = load()[0]
    before = [] if after is None else [after]
    child = runtime.cudaGraph_t(init_value=child)
    return call(runtime, "cudaGraphAddChildGraphNode", graph, before, len(before), child)


def add_conditional(graph: Any, after: Any, predicate: torch.Tensor, iterations: torch.Tensor, most: int, loop: bool):
    """Add a body that runs if, or as long as, a predicate is not zero.

    Args:
        graph: a `Handmade`'s, or the body of another conditional node.
        after: a node of it, or None.
        predicate: [] bool or int32.
        iterations: [] int64, where it is counted how often the body ran.
        most: runs of the body.
        loop: as long as, rather than if.

    Returns:
        The node; the body, an empty graph; and a function of (body, its last node) that closes a loop.
    """
    runtime = load()[0]
    handle = call(runtime, "cudaGraphConditionalHandleCreate", graph, 0, 0)
    arguments = SET_CONDITION, int(handle), predicate, iterations, most
    decision = _add_decision(graph, after, *arguments, BEFORE_LOOP if loop else AS_IF)
    params = runtime.cudaGraphNodeParams()
    params.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
    kinds = runtime.cudaGraphConditionalNodeType
    params.conditional.handle = handle
    params.conditional.type = kinds.cudaGraphCondTypeWhile if loop else kinds.cudaGraphCondTypeIf
    params.conditional.size = 1
    # Edges may have data from CUDA 12.3 on; the call with room for it has the plain name from CUDA 13 on.
    add = "cudaGraphAddNode_v2" if hasattr(runtime, "cudaGraphAddNode_v2") else "cudaGraphAddNode"
    node = call(runtime, add, graph, [decision], [runtime.cudaGraphEdgeData()], 1, params)
    body = runtime.cudaGraph_t(init_value=int(params.conditional.phGraph_out[0]))

    def close(last: Any) -> None:
        if loop:
            _add_decision(body, last, *arguments, AFTER_ITERATION)

    return node, body, close


def add_launch(
    graph: Any,
    after: Any,
    launched: int,
    stream: int,
    predicate: torch.Tensor,
    iterations: torch.Tensor,
    most: int,
    when: int,
    error: torch.Tensor,
) -> Any:
    """Add a kernel that launches a graph if a predicate is not zero.

    Args:
        graph, after, predicate, iterations, most: as for `add_conditional`.
        launched: what `Handmade.instantiate_for_kernels` returned; 0: the graph that the kernel is in.
        stream: TAIL or FIRE_AND_FORGET.
        when: AS_IF, BEFORE_LOOP or AFTER_ITERATION.
        error: [] int32, where the launch's own error is put, 0 for none.

    Returns:
        The node.
    """
    more = (stream, error.data_ptr()), (ctypes.c_uint64, ctypes.c_void_p)
    return _add_decision(graph, after, LAUNCH, launched, predicate, iterations, most, when, *more)


def error_name(code: int) -> str:
    """Of a number that a call of CUDA's runtime gave."""
    runtime = load()[0]
    try:
        return runtime.cudaError_t(code).name
    except ValueError:
        return f"error {code}"


def _add_decision(graph, after, source, handle, predicate, iterations, most, when, values=(), types=()):
    """Add a kernel that decides whether a body runs (again); `values` of `types` are its further arguments."""
    runtime, driver = load()
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = _kernel(predicate.device.index, source)
    for size in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"):
        setattr(params, size, 1)
    c = ctypes
    values = handle, predicate.data_ptr(), predicate.element_size(), iterations.data_ptr(), most, when, *values
    params.kernelParams = (values, (c.c_uint64, c.c_void_p, c.c_int, c.c_void_p, c.c_int64, c.c_int, *types))
    before = [] if after is None else [driver.CUgraphNode(init_value=int(after))]
    graph = driver.CUgraph(init_value=int(graph))
    node = call(driver, "cuGraphAddKernelNode", graph, before, len(before), params)
    return runtime.cudaGraphNode_t(init_value=int(node))


@functools.cache
def _kernel(device: int, source: bytes) -> Any:
    """The kernel of a source, loaded on a device, which is the current one."""
    _, driver = load()
    major, minor = torch.cuda.get_device_capability(device)
    module = call(driver, "cuModuleLoadData", cubin(source, f"sm_{major}{minor}"))
    return call(driver, "cuModuleGetFunction", module, b"decide")


def cubin(source: bytes, architecture: str) -> bytes:
    """A kernel compiled for an architecture ("sm_90"); needs no GPU.

    Raises:
        GraphError: NVRTC is missing, or does not know the architecture.
    """
    load()  # which says what to install
    from cuda.bindings import nvrtc

    program = call(nvrtc, "nvrtcCreateProgram", source, b"decide.cu", 0, [], [])
    try:
        return _compiled(nvrtc, program, architecture)
    finally:
        call(nvrtc, "nvrtcDestroyProgram", program)


def _compiled(nvrtc, program, architecture: str) -> bytes:
    try:
        call(nvrtc, "nvrtcCompileProgram", program, 1, [f"--gpu-architecture={architecture}".encode()])
    except GraphError as error:
        log = b" " * call(nvrtc, "nvrtcGetProgramLogSize", program)
        call(nvrtc, "nvrtcGetProgramLog", program, log)
        said = " ".join(log.decode(errors="replace").rstrip("\0").split())
        raise GraphError(f"{error} for {architecture}: {said}") from error
    code = b" " * call(nvrtc, "nvrtcGetCUBINSize", program)
    call(nvrtc, "nvrtcGetCUBIN", program, code)
    return code
