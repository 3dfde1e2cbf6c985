/** The numbers of a run in columns, and the few points that a chart can show. */

export class Series {
    steps = []
    loss = []
    smoothed = []
    rate = []
    /** [step, loss] pairs of the steps where it was measured. */
    validation = []
    /** The last entry of the log, with time left and memory. */
    last = null

    /** Add log entries. One that goes back to an earlier step, as after a restart, replaces the later ones. */
    append(entries) {
        for (const entry of entries) {
            while (this.steps.length && this.steps.at(-1) >= entry.step) this.#dropLast()
            this.steps.push(entry.step)
            this.loss.push(number(entry.loss))
            this.smoothed.push(number(entry.smoothed))
            this.rate.push(number(entry.lr))
            if (Number.isFinite(entry.validation)) this.validation.push([entry.step, entry.validation])
            this.last = entry
        }
    }

    /** Return the index of the step nearest to `step`, or -1 if there is none. */
    nearest(step) {
        if (!this.steps.length) return -1
        let low = 0
        let high = this.steps.length - 1
        while (low < high) {
            const middle = (low + high) >> 1
            if (this.steps[middle] < step) low = middle + 1
            else high = middle
        }
        return low > 0 && step - this.steps[low - 1] < this.steps[low] - step ? low - 1 : low
    }

    #dropLast() {
        const step = this.steps.pop()
        for (const column of [this.loss, this.smoothed, this.rate]) column.pop()
        if (this.validation.at(-1)?.[0] === step) this.validation.pop()
    }
}

/**
 * Return [x, y] points that look like all of `ys` when steps `first` to `end` are `width` pixels wide: for each
 * column of pixels the first, lowest, highest and last value, in order. A value that is not a number breaks the
 * line and is returned as null.
 */
export function thinned(steps, ys, first, end, width) {
    const perStep = width / (end - first)
    const at = (i) => [(steps[i] - first) * perStep, ys[i]]
    if (steps.length <= 4 * width) return steps.map((_, i) => (Number.isFinite(ys[i]) ? at(i) : null))
    const points = []
    for (let i = 0; i < steps.length; ) {
        const until = first + (Math.floor((steps[i] - first) * perStep) + 1) / perStep
        const start = i
        let [low, lowest, high, highest] = [-1, Infinity, -1, -Infinity]
        do {
            const y = ys[i]
            if (y < lowest) [low, lowest] = [i, y]
            if (y > highest) [high, highest] = [i, y]
            i++
        } while (i < steps.length && steps[i] < until)
        if (low < 0) points.push(null)
        else {
            let last = -1
            for (const k of [start, Math.min(low, high), Math.max(low, high), i - 1])
                if (k !== last && ys[k] === ys[k]) points.push(at((last = k)))
        }
    }
    return points
}

/** Return [low, high] around all but the most extreme hundredth of the values, from a sample of 1,000. */
export function range(values) {
    const every = Math.max(1, Math.floor(values.length / 1000))
    const some = new Float64Array(Math.ceil(values.length / every))
    let count = 0
    for (let i = 0; i < values.length; i += every) if (Number.isFinite(values[i])) some[count++] = values[i]
    if (!count) return null
    const sorted = some.subarray(0, count).sort()
    const cut = count > 200 ? Math.floor(count / 200) : 0
    return [sorted[cut], sorted[count - 1 - cut]]
}

/** Return up to about `count` round numbers between `low` and `high`. */
export function ticks(low, high, count) {
    const rough = (high - low) / count
    if (!(rough > 0)) return [low]
    const power = 10 ** Math.floor(Math.log10(rough))
    const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999)
    const found = []
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step)
    return found
}

/** Return 1, 2 and 5 times the powers of ten between `low` and `high`, as a logarithmic axis has them. */
export function logTicks(low, high) {
    const found = []
    for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
        for (const factor of [1, 2, 5])
            if (factor * power >= low && factor * power <= high) found.push(factor * power)
    return found.length > 1 ? found : [low, high]
}

/** Return a number in few characters: 0.0312, 12.5, 1e-4. */
export function short(value) {
    if (!Number.isFinite(value)) return "-"
    if (value === 0) return "0"
    const size = Math.abs(value)
    if (size < 0.001 || size >= 100000) return value.toExponential(1).replace(".0e", "e").replace("e+", "e")
    return String(Number(value.toPrecision(3)))
}

/** Return a duration like 0:42, 12:05 or 1:02:03. */
export function clock(seconds) {
    const whole = Math.round(seconds)
    const two = (n) => String(n).padStart(2, "0")
    const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60]
    return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`
}

function number(value) {
    return Number.isFinite(value) ? value : NaN
}
