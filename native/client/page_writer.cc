#include "client/page_writer.h"

#include <deque>

#include "base/error.h"
#include "base/sequence_point.h"
#include "gpu/mover.h"

namespace kvw {

namespace {

class HostWriter final : public PageWriter {
 public:
  explicit HostWriter(const Regions& regions) : regions_(regions) {}

  void put(size_t number, std::byte* to, const Key& key, const Seal& seal) override {
    regions_.pieces(number, pieces_);
    KVW_SEQUENCE_POINT("store: granted");
    const uint64_t digest = gather_digest(to, pieces_, key, seal.shard);
    KVW_SEQUENCE_POINT("store: copied");
    seals_.push_back({seal.generation, digest, seal.slot, seal.shard});
  }
  void start() override {}
  void finish() override {}

 private:
  const Regions& regions_;
  std::vector<Piece> pieces_;
};

// Gathered and digested by the device, batch by batch; two of them are on their way at a time, also
// while the caller asks for the next window.
class DeviceWriter final : public PageWriter {
 public:
  DeviceWriter(const Regions& regions, Gpus::Use gpu, gpu::Device::Borrowed mover,
               std::shared_ptr<ClientSession> session)
      : regions_(regions),
        gpu_(std::move(gpu)),
        session_(std::move(session)),
        mover_(std::move(mover)) {}
  ~DeviceWriter() override {
    if (!DeviceWriter::settle()) Gpus::keep(gpu_, session_);
  }

  void put(size_t number, std::byte* to, const Key& key, const Seal& seal) override {
    regions_.pieces(number, pieces_);
    if (filling_ == nullptr) begin();
    if (!filling_->batch->add(pieces_, to)) {
      launch();
      begin();
      filling_->batch->add(pieces_, to);
    }
    filling_->pages.push_back({key, seal});
    KVW_SEQUENCE_POINT("store: granted");
  }

  void start() override {
    if (filling_ != nullptr) launch();
    while (flights_.size() > launched_) land();
    launched_ = 0;
  }

  void finish() override {
    start();
    while (!flights_.empty()) land();
  }

  bool settle() override {
    bool all = true;
    for (const Flight& flight : flights_) all = flight.batch->settle() && all;
    return all;
  }

 private:
  struct Page {
    Key key;
    Seal seal;
  };
  struct Flight {
    gpu::Batch* batch;
    std::vector<Page> pages;
  };

  void begin() {
    while (flights_.size() >= gpu::Mover::kBatchesOnBus) land();
    filling_ = std::make_unique<Flight>(Flight{&mover_->batch(begun_++), {}});
    filling_->batch->begin(gpu::Way::to_host, regions_.page_bytes(), gpu_.arena.get());
  }
  void launch() {
    flights_.push_back(std::move(*filling_));
    filling_.reset();
    ++launched_;
    flights_.back().batch->start();
  }
  void land() {
    const Flight& flight = flights_.front();
    flight.batch->finish();
    KVW_SEQUENCE_POINT("store: copied");
    for (size_t i = 0; i < flight.pages.size(); ++i) {
      Seal seal = flight.pages[i].seal;
      seal.digest = flight.batch->digest(i, flight.pages[i].key, seal.shard);
      seals_.push_back(seal);
    }
    flights_.pop_front();
  }

  const Regions& regions_;
  Gpus::Use gpu_;
  std::shared_ptr<ClientSession> session_;
  gpu::Device::Borrowed mover_;
  std::vector<Piece> pieces_;
  size_t begun_ = 0, launched_ = 0;  // batches: of the call, and of the window that is put
  std::unique_ptr<Flight> filling_;
  std::deque<Flight> flights_;
};

}  // namespace

std::unique_ptr<PageWriter> page_writer(const ClientCall& call, Gpus& gpus,
                                        const Regions& regions) {
  if (regions.device() == nullptr) return std::make_unique<HostWriter>(regions);
  Gpus::Use gpu = gpus.use(regions.device()->ordinal, call.view());
  // Nothing is read before the engine has written it; waited for here and not on the stream, so
  // that the wait has an end.
  gpu::Device::Borrowed mover = gpu.device->borrow(call.deadline_ns);
  if (mover == nullptr || !gpu.device->wait(regions.device()->ready, call.deadline_ns))
    return nullptr;
  return std::make_unique<DeviceWriter>(regions, std::move(gpu), std::move(mover),
                                        call.daemon->session);
}

}  // namespace kvw
