/** Train Steps inside a subgraph: what the subgraph's own node shows of it. */

/** Inputs of Train Steps that a new subgraph has outside. */
const EXPOSED = { steps: "INT", name: "STRING" }

/** Return every node of a graph and of the subgraphs in it. */
export function allNodes(graph) {
    return (graph?.nodes ?? []).flatMap((node) => [node, ...allNodes(node.subgraph)])
}

/** Return the nodes with an id like "12:3": the subgraph's node 12, and node 3 in it; [] if there is none. */
export function nodesAt(graph, id) {
    const nodes = []
    for (const part of String(id ?? "").split(":")) {
        const node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part))
        if (!node) return []
        nodes.push(node)
        graph = node.subgraph
    }
    return nodes
}

/** Return whether a node is a subgraph's that has nodes of this class in it. */
export function holds(node, kind) {
    return Boolean(node.subgraph) && allNodes(node.subgraph).some(({ comfyClass }) => comfyClass === kind)
}

/** Give a subgraph inputs for the widgets that people set, where exactly one node of this class is in it. */
export function expose(node, kind) {
    const [inner, ...others] = node.subgraph.nodes.filter(({ comfyClass }) => comfyClass === kind)
    if (!inner || others.length) return
    for (const [name, type] of Object.entries(EXPOSED)) {
        const slot = inner.inputs?.find(({ widget }) => widget?.name === name)
        if (slot && slot.link == null) node.subgraph.addInput(name, type).connect(slot, inner)
    }
}
