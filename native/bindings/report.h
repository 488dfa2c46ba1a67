// The core's reports as the nested dicts that status.proto describes.
#pragma once

#include "bindings/bindings.h"
#include "server/why_report.h"
#include "warehouse/warehouse.h"

namespace kvw::bindings {

nb::dict dict_of(const RecoverySummary& summary);
nb::dict dict_of(const WarehouseStatus& status, const RecoverySummary& recovery,
                 const Key& warehouse_id, uint64_t connections);
nb::dict dict_of(const PageInfo& page);
nb::dict dict_of(const MissRatioReport& report);
nb::dict dict_of(const CheckReport& report);
nb::dict dict_of(const KeepReport& report);
nb::dict dict_of(const WhyReport& report);
// "a=1 b=two" as {"a": "1", "b": "two"}; text without '=' becomes {"detail": text}.
nb::dict fields_of(const std::string& detail);

}  // namespace kvw::bindings
