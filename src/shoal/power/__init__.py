"""Heat and energy: sensors where the system tells them, and the governor that acts on them."""

from shoal.power.governor import Action, Decision, Governor, PowerPolicy
from shoal.power.readings import Level, Reading, Sensor, Unit
from shoal.power.sensors import Found, SimulatedSensor, find_sensors, survey

__all__ = [
    "Action",
    "Decision",
    "Found",
    "Governor",
    "Level",
    "PowerPolicy",
    "Reading",
    "Sensor",
    "SimulatedSensor",
    "Unit",
    "find_sensors",
    "survey",
]
