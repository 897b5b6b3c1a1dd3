"""From an `EngineConfig` and a model folder to an `EnginePlan`; imports no torch."""
