/** Draws a run on a canvas: loss on the left axis, learning rate on the right, marks along the steps. */

import { logTicks, range, short, thinned, ticks } from "./series.js"

export const COLORS = {
    loss: "#6f8fb3",
    smoothed: "#3f9bff",
    validation: "#ff9a3c",
    rate: "#58b368",
    checkpoint: "#8c939c",
    sample: "#c07ce8",
}

const MARGIN = { left: 40, right: 40, top: 12, bottom: 18 }

/**
 * Draw `series` on a canvas context of `width` x `height` CSS pixels.
 *
 * `view` is {end: last step of the axis, log: logarithmic loss, hover: index of a step or -1, checkpoints and
 * samples: steps to mark, text: color of the axes}.
 */
export function draw(context, width, height, series, view) {
    context.clearRect(0, 0, width, height)
    const box = boxOf(width, height)
    if (!series.steps.length) return
    context.font = "10px sans-serif"
    const scales = scalesOf(series, view, box)
    drawAxes(context, box, scales, view)
    drawMarks(context, box, scales, view)
    context.save()
    context.beginPath()
    context.rect(box.left, box.top - 2, box.width, box.height + 4)
    context.clip()
    line(context, series, series.rate, scales, scales.rate.toY, COLORS.rate, 1, [4, 3])
    line(context, series, series.loss, scales, scales.loss.toY, COLORS.loss, 1, [], 0.55)
    line(context, series, series.smoothed, scales, scales.loss.toY, COLORS.smoothed, 2)
    drawValidation(context, series, scales)
    if (view.hover >= 0) drawHover(context, series, scales, view, box)
    context.restore()
}

/** Return the part of a chart of this size that lies within its axes. */
export function boxOf(width, height) {
    return {
        left: MARGIN.left,
        top: MARGIN.top,
        width: Math.max(1, width - MARGIN.left - MARGIN.right),
        height: Math.max(1, height - MARGIN.top - MARGIN.bottom),
    }
}

/** Return the step at the horizontal position `x` in a chart of this width. */
export function stepAt(x, width, series, view) {
    const { first, end } = extent(series, view)
    return first + ((x - MARGIN.left) / Math.max(1, width - MARGIN.left - MARGIN.right)) * (end - first)
}

function extent(series, view) {
    const first = series.steps[0] ?? 0
    return { first, end: Math.max(view.end ?? 0, series.steps.at(-1) ?? 1, first + 1) }
}

function scalesOf(series, view, box) {
    const { first, end } = extent(series, view)
    const x = (step) => box.left + ((step - first) / (end - first)) * box.width
    const loss = axis(padded(lossRange(series), view.log), view.log, box)
    const rates = range(series.rate) ?? [0, 1]
    return { first, end, width: box.width, x, loss, rate: axis([0, rates[1] * 1.1 || 1], false, box) }
}

function lossRange(series) {
    const ranges = [series.loss, series.smoothed, series.validation.map(([, value]) => value)].map(range).filter(Boolean)
    return [Math.min(...ranges.map((r) => r[0])), Math.max(...ranges.map((r) => r[1]))]
}

export function padded([low, high], log) {
    if (!Number.isFinite(low) || !Number.isFinite(high)) return [0, 1]
    if (log && low > 0) return [low / 1.1, high * 1.1]
    const space = (high - low || Math.abs(high) || 1) * 0.06
    return [low >= 0 ? Math.max(0, low - space) : low - space, high + space]
}

/** Return {ticks, toY} of a vertical axis over [low, high]. */
export function axis([low, high], log, box) {
    const logarithmic = log && low > 0
    const place = logarithmic ? Math.log : (value) => value
    const toY = (value) =>
        box.top + box.height * (1 - (place(logarithmic ? Math.max(value, low / 10) : value) - place(low)) / (place(high) - place(low)))
    return { toY, ticks: logarithmic ? logTicks(low, high) : ticks(low, high, Math.max(3, Math.floor(box.height / 28))) }
}

export function drawAxes(context, box, scales, view) {
    const right = box.left + box.width
    const bottom = box.top + box.height
    context.strokeStyle = context.fillStyle = view.text
    context.lineWidth = 1
    context.textBaseline = "middle"
    for (const value of scales.loss.ticks) {
        const y = Math.round(scales.loss.toY(value)) + 0.5
        context.globalAlpha = 0.15
        stroke(context, [[box.left, y], [right, y]])
        context.globalAlpha = 0.8
        context.textAlign = "right"
        context.fillText(short(value), box.left - 5, y)
    }
    context.textAlign = "left"
    context.fillStyle = COLORS.rate
    for (const value of scales.rate?.ticks.slice(1) ?? []) context.fillText(short(value), right + 5, scales.rate.toY(value))
    context.fillStyle = view.text
    context.textAlign = "center"
    context.textBaseline = "top"
    for (const step of ticks(scales.first, scales.end, Math.max(2, Math.floor(box.width / 70))))
        if (Number.isInteger(step)) context.fillText(String(step), scales.x(step), bottom + 6)
    context.globalAlpha = 0.4
    stroke(context, [[box.left, bottom + 0.5], [right, bottom + 0.5]])
    context.globalAlpha = 1
}

/** Draw checkpoints as triangles below the axis, samples as diamonds at the top. */
function drawMarks(context, box, scales, view) {
    const bottom = box.top + box.height
    for (const step of view.checkpoints) {
        const x = scales.x(step)
        fill(context, COLORS.checkpoint, [[x, bottom], [x - 3.5, bottom + 6], [x + 3.5, bottom + 6]])
    }
    for (const step of view.samples) {
        const x = scales.x(step)
        fill(context, COLORS.sample, [[x, 1], [x + 4, 5], [x, 9], [x - 4, 5]])
        context.globalAlpha = 0.25
        context.strokeStyle = COLORS.sample
        stroke(context, [[x, 9], [x, bottom]])
        context.globalAlpha = 1
    }
}

export function line(context, series, ys, scales, toY, color, width, dash = [], alpha = 1) {
    const points = thinned(series.steps, ys, scales.first, scales.end, scales.width)
    const left = scales.x(scales.first)
    context.strokeStyle = color
    context.lineWidth = width
    context.lineJoin = "round"
    context.globalAlpha = alpha
    context.setLineDash(dash)
    context.beginPath()
    let pen = false
    for (const point of points) {
        if (!point) pen = false
        else if (pen) context.lineTo(left + point[0], toY(point[1]))
        else context.moveTo(left + point[0], toY(point[1]))
        pen = Boolean(point)
    }
    context.stroke()
    context.setLineDash([])
    context.globalAlpha = 1
    if (series.steps.length === 1 && points[0]) dot(context, left + points[0][0], toY(points[0][1]), color)
}

function drawValidation(context, series, scales) {
    const [steps, values] = [0, 1].map((column) => series.validation.map((pair) => pair[column]))
    const left = scales.x(scales.first)
    const points = thinned(steps, values, scales.first, scales.end, scales.width).map(([x, value]) => [left + x, scales.loss.toY(value)])
    context.strokeStyle = COLORS.validation
    context.lineWidth = 1.5
    stroke(context, points)
    if (points.length < 100) for (const [x, y] of points) dot(context, x, y, COLORS.validation)
}

function drawHover(context, series, scales, view, box) {
    const x = scales.x(series.steps[view.hover])
    context.strokeStyle = view.text
    context.globalAlpha = 0.5
    context.lineWidth = 1
    stroke(context, [[x, box.top], [x, box.top + box.height]])
    context.globalAlpha = 1
    for (const name of ["loss", "smoothed"])
        if (Number.isFinite(series[name][view.hover])) dot(context, x, scales.loss.toY(series[name][view.hover]), COLORS[name])
}

function stroke(context, points) {
    context.beginPath()
    points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)))
    context.stroke()
}

function fill(context, color, points) {
    context.fillStyle = color
    context.beginPath()
    points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)))
    context.closePath()
    context.fill()
}

function dot(context, x, y, color) {
    context.fillStyle = color
    context.beginPath()
    context.arc(x, y, 2.5, 0, 2 * Math.PI)
    context.fill()
}
