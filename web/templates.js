/** Graft's templates in the order of their names: ComfyUI lists them as the file system does. */

const FOLDER = new URL(import.meta.url).pathname.split("/").at(-2)

/** Sort Graft's names in what ComfyUI's dialog of templates asks for. */
export function sortTemplates(api) {
    const { getWorkflowTemplates } = api
    if (!getWorkflowTemplates) return
    api.getWorkflowTemplates = async function (...args) {
        const found = await getWorkflowTemplates.apply(this, args)
        found?.[FOLDER]?.sort?.()
        return found
    }
}
