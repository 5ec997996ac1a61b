"""The calls of cuda-bindings that read and update a captured graph, for which torch has no name.

Loaded only where it is needed. Every call of cuda-bindings returns `(error, *results)`; `call` raises the error by the
call's own name. Captured graphs are given by their address, as torch gives them.
"""

from typing import Any

import torch

from rlgraph.errors import GraphError
from rlgraph.graph.topology import Contents, Node

# By cudaGraphNodeType's names, without their prefix.
KINDS = {
    "Kernel": "kernel",
    "Memcpy": "memcpy",
    "Memset": "memset",
    "Host": "host",
    "Graph": "child graph",
    "Empty": "empty",
    "WaitEvent": "wait for event",
    "EventRecord": "record event",
    "ExtSemaphoreSignal": "signal semaphore",
    "ExtSemaphoreWait": "wait for semaphore",
    "MemAlloc": "allocation",
    "MemFree": "free",
    "Conditional": "conditional",
}
# By cudaMemcpyKind's names, without their prefix; "Default" leaves it to the addresses.
DIRECTIONS = {f"{a}To{b}": f"{a.lower()}-to-{b.lower()}" for a in ("Host", "Device") for b in ("Host", "Device")}


def load() -> tuple[Any, Any]:
    """cuda-bindings' modules (runtime, driver).

    Raises:
        GraphError: the package is not installed.
    """
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        major = (torch.version.cuda or "13").split(".")[0]
        raise GraphError(
            f"this needs the package cuda-bindings, which cannot be imported ({error}): "
            f'pip install "cuda-bindings=={major}.*"'
        ) from error
    return runtime, driver


def call(api: Any, name: str, *args) -> Any:
    """`api.name(*args)`: its result, a list of its results if there are several, None if there is none.

    Raises:
        GraphError: the call failed, or this version of cuda-bindings has no such call.
    """
    function = getattr(api, name, None)
    if function is None:
        raise GraphError(f"cuda-bindings has no {name}: install a newer version of the package")
    try:
        error, *results = function(*args)
    except RuntimeError as missing:  # how cuda-bindings says that the driver has no such function, or is not there
        raise GraphError(f"{name} failed: {missing}; install a newer NVIDIA driver") from missing
    if int(error) != 0:
        raise GraphError(f"{name} failed: {getattr(error, 'name', error)}")
    return results[0] if len(results) == 1 else results or None


def check_driver(oldest: int, what: str) -> None:
    """Raise a GraphError where the driver is for a version of CUDA before `oldest`, the first that has `what`."""
    version = call(load()[0], "cudaDriverGetVersion")
    if version < oldest:
        needed, found = (f"{number // 1000}.{number % 1000 // 10}" for number in (oldest, version))
        raise GraphError(
            f"{what} needs a driver for CUDA {needed} or later, and this one is for CUDA {found}: install a newer "
            "NVIDIA driver"
        )


# ---- reading


def read(graph: int) -> Contents:
    """The nodes and edges of a cudaGraph_t, which is given by its address, and of the child graphs inside it.

    The device's context must be current. The bodies of conditional nodes are not read: CUDA 13.0 has no call for it.

    Raises:
        GraphError: cuda-bindings is missing, or a call failed.
    """
    runtime, driver = load()
    return _contents(runtime, driver, runtime.cudaGraph_t(init_value=graph))


def _contents(runtime, driver, graph) -> Contents:
    _, count = call(runtime, "cudaGraphGetNodes", graph, 0)
    handles = call(runtime, "cudaGraphGetNodes", graph, count)[0][:count] if count else []
    index = {int(handle): i for i, handle in enumerate(handles)}
    edges = [(index[int(start)], index[int(end)]) for start, end in _edges(runtime, graph)]
    nodes, children = [], {}
    for i, handle in enumerate(handles):
        nodes.append(node_of(runtime, driver, handle))
        if nodes[-1].kind == "child graph":
            inside = call(runtime, "cudaGraphChildGraphNodeGetGraph", handle)
            children[i] = _contents(runtime, driver, inside)
    return Contents(nodes, edges, children)


def _edges(runtime, graph) -> list[tuple]:
    """Pairs of handles. There are calls with and without data of the edges: CUDA 13 has the former by the old name."""
    name = "cudaGraphGetEdges_v2" if hasattr(runtime, "cudaGraphGetEdges_v2") else "cudaGraphGetEdges"
    count = call(runtime, name, graph, 0)[-1]
    if not count:
        return []
    starts, ends, *_ = call(runtime, name, graph, count)
    return list(zip(starts[:count], ends[:count]))


def node_of(runtime, driver, handle) -> Node:
    kind = call(runtime, "cudaGraphNodeGetType", handle).name.removeprefix("cudaGraphNodeType")
    kind = KINDS.get(kind, kind)
    if kind == "kernel":
        return Node(kind, _kernel_name(driver, handle))
    return Node(kind, _direction(runtime, handle)) if kind == "memcpy" else Node(kind)


def _kernel_name(driver, handle) -> str:
    """The driver's calls: the runtime's give an address in the program in place of a function."""
    params = call(driver, "cuGraphKernelNodeGetParams", driver.CUgraphNode(init_value=int(handle)))
    if int(params.func):
        name = call(driver, "cuFuncGetName", params.func)
    else:
        name = call(driver, "cuKernelGetName", params.kern)
    return name.decode() if isinstance(name, bytes) else str(name)


def _direction(runtime, handle) -> str:
    params = call(runtime, "cudaGraphMemcpyNodeGetParams", handle)
    kind = runtime.cudaMemcpyKind(params.kind).name.removeprefix("cudaMemcpy")
    if kind in DIRECTIONS:
        return DIRECTIONS[kind]
    source = _place(runtime, params.srcArray, params.srcPtr)
    return f"{source}-to-{_place(runtime, params.dstArray, params.dstPtr)}"


def _place(runtime, array, pitched) -> str:
    """Where one end of a copy lies: "host" or "device"; arrays and managed memory count as the device's."""
    if int(array):
        return "device"
    memory = call(runtime, "cudaPointerGetAttributes", pitched.ptr).type
    host = (runtime.cudaMemoryType.cudaMemoryTypeUnregistered, runtime.cudaMemoryType.cudaMemoryTypeHost)
    return "host" if memory in host else "device"


# ---- updating


def update(executable: int, old: int, new: int) -> str | None:
    """Give an instantiated graph, whose nodes are those of `old`, the parameters of the nodes of `new`.

    Returns:
        None if it is done, else why it is not, in words: it must not be launched then.
    """
    try:
        runtime = load()[0]
        handles = runtime.cudaGraphExec_t(init_value=executable), runtime.cudaGraph_t(init_value=new)
        call(runtime, "cudaGraphExecUpdate", *handles)
    except GraphError as error:
        return f"{error}{_difference(old, new)}"
    return None


def _difference(old: int, new: int) -> str:
    """In words: cuda-bindings does not give what CUDA says about an update that is refused."""
    try:
        before, after = read(old), read(new)
    except GraphError:
        return ""
    for what in ("nodes", "edges"):
        counts = len(getattr(before, what)), len(getattr(after, what))
        if counts[0] != counts[1]:
            return f" ({counts[1]} {what} in place of {counts[0]})"
    if sorted(node.kind for node in before.nodes) != sorted(node.kind for node in after.nodes):
        return " (nodes of other kinds)"
    return ""
