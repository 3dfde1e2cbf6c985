"""What a model is called with."""


def recorded(denoiser, monkeypatch):
    """Return a list that gets the arguments of every call of the model."""
    calls, apply_model = [], denoiser.model.apply_model

    def record(x, t, **conditions):
        calls.append({"x": x, "t": t, **conditions})
        return apply_model(x, t, **conditions)

    monkeypatch.setattr(denoiser.model, "apply_model", record, raising=False)
    return calls
