"""Network ports: node_exporter's InfiniBand and RoCE counters, infiniband-exporter's raw words, Omnistat. Rows only."""

from __future__ import annotations

from typing import Any

from features.exporters.metric import Metric, family

_node = family("node_exporter", "node_infiniband_", entity="port", kind="counter")
_state = family("node_exporter", "node_infiniband_", entity="port")
# It asks the subnet manager for every port of the fabric: ports of hosts are `ca`.
_CA = (("component", "^ca$"),)
_words = family("infiniband-exporter", "infiniband_", entity="port", kind="counter", where=_CA)
# Cards that carry jobs; `net` is every interface of the host.
_CARDS = (("device_class", "^(infiniband|cxi|ionic|bnxt_re)$"),)
_omnistat = family("omnistat", "omnistat_network_", entity="port", kind="counter_typed_gauge", where=_CARDS)
_OCTETS: dict[str, Any] = {"scale": 4.0, "meaning": "counts words of four octets"}


def _parts(rows: Any, column: str, names: str) -> list[Metric]:
    return [row for name in names.split() for row in rows(name, column, part=name)]


ROWS: tuple[Metric, ...] = (
    *_node("port_data_transmitted_bytes_total", "tx_bytes_total"),
    *_node("port_data_received_bytes_total", "rx_bytes_total"),
    *_node("legacy_data_transmitted_bytes_total", "tx_bytes_total", rank=1),
    *_node("legacy_data_received_bytes_total", "rx_bytes_total", rank=1),
    *_node("port_transmit_wait_total", "transmit_wait_total", meaning="ticks; some cards stop at 4294967295"),
    *_parts(_node, "port_errors_total",
            "symbol_error_total link_error_recovery_total local_link_integrity_errors_total port_errors_received_total "
            "port_discards_received_total port_discards_transmitted_total port_constraint_errors_received_total "
            "port_constraint_errors_transmitted_total excessive_buffer_overrun_errors_total out_of_buffer_drops_total "
            "rx_icrc_encapsulated_errors_total"),
    *_node("link_downed_total", "link_downed_total"),
    *_node("np_ecn_marked_roce_packets_received_total", "ecn_marked_total"),
    *_parts(_node, "cnp_total", "np_cnp_packets_sent_total rp_cnp_packets_handled_total"),
    *_parts(_node, "retransmits_total",
            "out_of_sequence_packets_received_total packet_sequence_errors_total local_ack_timeout_errors_total "
            "rnr_nak_retry_packets_received_total roce_adp_retransmits_total"),
    *_state("state_id", "is_link_up", equals=4, meaning="4: active"),
    *_state("physical_state_id", "is_link_up", rank=1, equals=5, meaning="5: link up"),
    *_state("rate_bytes_per_second", "speed_bytes_per_s"),
    *_state("info", "", kind="info", meaning="board and firmware of a card in labels"),
    *_node("port_packets_* legacy_*packets_* multicast_packets_* unicast_packets_*", "", meaning="packets"),
    *_node("vl15_dropped_total", "", meaning="management packets dropped"),
    *_node("rp_cnp_ignored_packets_received_total roce_slow_restart_*total", "", meaning="congestion control of RoCE"),
    *_words("portxmitdata_total", "tx_bytes_total", **_OCTETS),
    *_words("portrcvdata_total", "rx_bytes_total", **_OCTETS),
    *_words("portxmitwait_total", "transmit_wait_total"),
    *_words("linkdownedcounter_total", "link_downed_total"),
    *_parts(_words, "port_errors_total",
            "symbolerrorcounter_total linkerrorrecoverycounter_total locallinkintegrityerrors_total "
            "portrcverrors_total portxmitdiscards_total"),
    *family("infiniband-exporter", "infiniband_", entity="port")("speed width", "", meaning="Gb/s of a lane; lanes"),
    *_omnistat("tx_bytes", "tx_bytes_total"),
    *_omnistat("rx_bytes", "rx_bytes_total"),
    *_omnistat("rx_ecn_marked_packets", "ecn_marked_total"),
    *_omnistat("rx_cnp_packets", "cnp_total"),
    *_parts(_omnistat, "retransmits_total", "tx_retransmitted_packets rx_out_of_sequence_packets"),
    *_parts(_omnistat, "port_errors_total", "rx_discarded_packets tx_discarded_packets"),
)  # fmt: skip
