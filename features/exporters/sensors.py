"""Sensors of nodes (ipmi_exporter, idrac_exporter over Redfish), host memory (node_exporter), step times. Rows only.

Names of sensors are the vendor's, so they are matched by a pattern; a room's comes before a node's inlet, as in
`Room Ambient`.
"""

from __future__ import annotations

from features.exporters.metric import Metric, family

_ROOM = r"(^|.*[^a-z])(hall|room|aisle|crac|crah)($|[^a-z])"
INLET = (("name", rf"(?i)^(?!{_ROOM}).*(inlet|ambient|intake)"),)
HALL = (("name", rf"(?i)^{_ROOM}"),)
_WHOLE = (("name", r"(?i)pwr consumption|sys.*(pwr|power)|total.*power"),)
_ipmi = family("ipmi_exporter", "ipmi_", entity="node")
_host = family("node_exporter", "node_", entity="node")
_idrac = family("idrac_exporter", "idrac_", entity="node")
_job = family("weatherglass", "weatherglass_")

ROWS: tuple[Metric, ...] = (
    *_job("step_time_seconds", "step_time_s", meaning="written by the job itself"),
    *_job("own_step_time_seconds", "own_step_time_s", meaning="of a rank, before it waits for its gang"),
    *_ipmi("temperature_celsius", "inlet_temp_c", where=INLET),
    *_idrac("sensors_temperature", "inlet_temp_c", rank=1, where=INLET),
    *_ipmi("temperature_celsius", "hall_temp_c", where=HALL),
    *_idrac("sensors_temperature", "hall_temp_c", rank=1, where=HALL),
    *_ipmi("dcmi_power_consumption_current_watts", "node_power_w"),
    *_idrac("power_control_consumed_watts", "node_power_w", rank=1),
    *_ipmi("dcmi_power_consumption_watts", "node_power_w", rank=2),
    *_ipmi("power_watts", "node_power_w", rank=3, where=_WHOLE),
    *_host("memory_MemAvailable_bytes", "host_mem_available_bytes"),
    *_host("memory_MemTotal_bytes", "host_mem_total_bytes"),
    *_host("vmstat_oom_kill", "oom_kills_total", meaning="since the kernel started; untyped"),
    *_ipmi("temperature_state sensor_state fan_speed_state power_state voltage_state current_state", "",
           meaning="0 nominal, 1 warning, 2 critical, NaN not there"),
    *_ipmi("fan_speed_rpm fan_speed_ratio sensor_value", "", meaning="other sensors"),
    *_ipmi("up", "", meaning="1: the collector read its sensors"),
    *_idrac("sensors_fan_speed", "", meaning="fans"),
    *_idrac("power_supply_input_watts", "", meaning="one power supply, W"),
    *_idrac("system_health", "", kind="info", meaning="health of the system, by status"),
    *_idrac("events_log_entry", "", kind="info", meaning="an entry of the event log in labels"),
)  # fmt: skip
