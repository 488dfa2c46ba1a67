// A session file is its client's to write: whatever is in it, and however long it is, the daemon
// reads pins, touches and counters of it within bounds, and buries it when its owner is gone.
#include <fcntl.h>

#include <cstddef>

#include "fuzz/target.h"
#include "session/registry.h"
#include "tests/warehouse_world.h"

namespace kvw::fuzz {
namespace {

constexpr uint32_t kSlots = 1 << 20;
constexpr std::array<size_t, 6> kPlaces{0,
                                        offsetof(SessionFile, pins_high),
                                        offsetof(SessionFile, touch_head),
                                        offsetof(SessionFile, counters),
                                        offsetof(SessionFile, touches),
                                        offsetof(SessionFile, pins)};

void write_file(const std::string& path, Input input) {
  const Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  const auto length = input.number<uint16_t>();
  // Mostly whole, else cut anywhere.
  const size_t bytes = length % 4 != 0 ? sizeof(SessionFile) : length * 6ull;
  require(::ftruncate(file.get(), static_cast<off_t>(bytes)) == 0, "the file is sized");
  while (!input.empty()) {
    const size_t at =
        kPlaces[input.number<uint8_t>() % kPlaces.size()] + input.number<uint8_t>() % 64 * 8;
    const auto word = input.number<uint64_t>();
    if (at + sizeof word > bytes) continue;
    require(::pwrite(file.get(), &word, sizeof word, static_cast<off_t>(at)) == sizeof word,
            "the file is written");
  }
}

}  // namespace
}  // namespace kvw::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvw;
  static const TempDir directory;
  static FakeClock clock;
  const std::string path = directory.path() + "/00000000000000a1";
  fuzz::write_file(path, fuzz::Input(data, size));
  Registry registry(directory.path(), kWarehouse, clock, kSecondNs, fuzz::kSlots,
                    [] { return std::unordered_set<SessionId>{0xa1}; });
  // Once as an earlier daemon left it, and once more after its owner has written on.
  for (int round = 0; round < 2; ++round) {
    const PinSet& pins = registry.pins();
    fuzz::require(pins.size() <= kPinCapacity, "pins are bounded");
    fuzz::require(!pins.has_slot(fuzz::kSlots), "what does not exist is not pinned");
    uint64_t touches = 0;
    registry.drain_touches([&](PageId, uint32_t) { ++touches; });
    fuzz::require(touches <= kTouchCapacity, "touches are bounded");
    registry.totals();
    fuzz::write_file(path, fuzz::Input(data + size / 2, size - size / 2));
  }
  registry.reap();
  clock.advance_ns(2 * kSecondNs);
  fuzz::require(registry.reap().size() == 1 && registry.size() == 0, "it is reaped");
  return 0;
}
