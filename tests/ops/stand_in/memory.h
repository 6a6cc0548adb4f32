// The memory of one call: the host's or, with -DHOP_TF_WITH_CUDA, a device's.
//
// A kernel that runs on the wrong stream, uses scratch memory too long, or writes beside an array must not go unseen.
// So new memory is poisoned in stream order, freed memory is given out again in stream order, and guards lie on both
// sides of each array. They are looked at when the array is freed.

#ifndef HOP_TF_TESTS_OPS_STAND_IN_MEMORY_H_
#define HOP_TF_TESTS_OPS_STAND_IN_MEMORY_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#ifdef HOP_TF_WITH_CUDA
#include <cuda_runtime_api.h>
#include <unistd.h>
#endif

namespace stand_in {

constexpr size_t kGuardBytes = 256;  // A multiple of the alignment that kernels may expect.
constexpr unsigned char kGuard = 0xA5, kPoison = 0xEE;

class Memory {
 public:
  virtual ~Memory() = default;

  virtual uint8_t* Allocate(size_t num_bytes) = 0;
  virtual void Free(uint8_t* block) = 0;
  virtual void Fill(uint8_t* to, unsigned char byte, size_t num_bytes) = 0;
  virtual void Write(const void* host, size_t num_bytes, uint8_t* to) = 0;
  virtual void Read(const uint8_t* from, size_t num_bytes, void* host) = 0;
  virtual void CheckGuard(const uint8_t* guard) = 0;

  virtual void* stream() const = 0;
  virtual void Delay() {}  // Whatever runs on another stream runs before the work that follows.

  // Waits for all work, and returns what went wrong.
  virtual std::string Finish() { return num_broken_guards_ == 0 ? "" : "a kernel wrote beside an array."; }

 protected:
  void CountGuard(const uint8_t* guard) {
    num_broken_guards_ += !std::all_of(guard, guard + kGuardBytes, [](uint8_t byte) { return byte == kGuard; });
  }

 private:
  int num_broken_guards_ = 0;
};

// Without a device, what is registered for GPUs runs here, too, with the kernels of cuda.cc.
class HostMemory : public Memory {
 public:
  static inline void* const kStream = reinterpret_cast<void*>(0x57);

  void* stream() const override { return kStream; }
  uint8_t* Allocate(size_t num_bytes) override { return static_cast<uint8_t*>(std::malloc(num_bytes)); }
  void Free(uint8_t* block) override { std::free(block); }
  void Fill(uint8_t* to, unsigned char byte, size_t num_bytes) override { std::memset(to, byte, num_bytes); }
  void Write(const void* host, size_t num_bytes, uint8_t* to) override {
    if (num_bytes > 0) std::memcpy(to, host, num_bytes);
  }
  void Read(const uint8_t* from, size_t num_bytes, void* host) override {
    if (num_bytes > 0) std::memcpy(host, from, num_bytes);
  }
  void CheckGuard(const uint8_t* guard) override { CountGuard(guard); }
};

#ifdef HOP_TF_WITH_CUDA

// On one stream that waits for no other, as TensorFlow's. Like TensorFlow's, this allocator gives freed memory out
// again before the kernels that used it have ended.
class DeviceMemory : public Memory {
 public:
  DeviceMemory() { Check(cudaMallocHost(reinterpret_cast<void**>(&guards_), kMaxGuards * kGuardBytes)); }
  ~DeviceMemory() override { cudaFreeHost(guards_); }

  uint8_t* Allocate(size_t num_bytes) override {
    void* block = nullptr;
    Check(cudaMallocAsync(&block, num_bytes, stream_));
    return static_cast<uint8_t*>(block);
  }
  void Free(uint8_t* block) override { Check(cudaFreeAsync(block, stream_)); }
  void Fill(uint8_t* to, unsigned char byte, size_t num_bytes) override {
    Check(cudaMemsetAsync(to, byte, num_bytes, stream_));
  }
  void Write(const void* host, size_t num_bytes, uint8_t* to) override {
    Check(cudaMemcpyAsync(to, host, num_bytes, cudaMemcpyHostToDevice, stream_));
  }
  void Read(const uint8_t* from, size_t num_bytes, void* host) override {
    Check(cudaMemcpyAsync(host, from, num_bytes, cudaMemcpyDeviceToHost, stream_));
    Check(cudaStreamSynchronize(stream_));
  }

  // Into page-locked memory: the host does not wait for the copy.
  void CheckGuard(const uint8_t* guard) override {
    if (num_guards_ == kMaxGuards) return;
    uint8_t* const copy = guards_ + num_guards_++ * kGuardBytes;
    Check(cudaMemcpyAsync(copy, guard, kGuardBytes, cudaMemcpyDeviceToHost, stream_));
  }

  void* stream() const override { return stream_; }
  void Delay() override {
    Check(cudaLaunchHostFunc(stream_, [](void*) { usleep(kDelayMicroseconds); }, nullptr));
  }

  std::string Finish() override {
    Check(cudaStreamSynchronize(stream_));
    if (error_ != cudaSuccess) return cudaGetErrorString(error_);
    for (; num_guards_ > 0; --num_guards_) CountGuard(guards_ + (num_guards_ - 1) * kGuardBytes);
    return Memory::Finish();
  }

 private:
  static constexpr int kMaxGuards = 64;
  static constexpr int kDelayMicroseconds = 2000;

  static cudaStream_t NewStream() {
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    return stream;
  }
  static cudaStream_t TheStream() {
    static const cudaStream_t stream = NewStream();
    return stream;
  }

  void Check(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }

  const cudaStream_t stream_ = TheStream();
  cudaError_t error_ = cudaSuccess;
  uint8_t* guards_ = nullptr;
  int num_guards_ = 0;
};

#endif  // HOP_TF_WITH_CUDA

inline std::unique_ptr<Memory> NewMemory([[maybe_unused]] const std::string& device) {
#ifdef HOP_TF_WITH_CUDA
  if (device == "GPU") return std::make_unique<DeviceMemory>();
#endif
  return std::make_unique<HostMemory>();
}

// Counts what operations get and have to give back.
inline std::atomic<int64_t> num_live = 0;

struct Counted {
  Counted() { ++num_live; }
  Counted(const Counted&) { ++num_live; }
  Counted& operator=(const Counted&) = default;
  ~Counted() { --num_live; }
};

// An array with its guards.
class Buffer : Counted {
 public:
  Buffer(Memory* memory, size_t num_bytes)
      : memory_(memory), num_bytes_(num_bytes), block_(memory->Allocate(num_bytes + 2 * kGuardBytes)) {
    memory_->Fill(block_, kGuard, kGuardBytes);
    memory_->Fill(data(), kPoison, num_bytes_);
    memory_->Fill(data() + num_bytes_, kGuard, kGuardBytes);
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() {
    memory_->CheckGuard(block_);
    memory_->CheckGuard(data() + num_bytes_);
    memory_->Free(block_);
  }

  uint8_t* data() const { return block_ + kGuardBytes; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  Memory* const memory_;
  const size_t num_bytes_;
  uint8_t* const block_;
};

}  // namespace stand_in

#endif  // HOP_TF_TESTS_OPS_STAND_IN_MEMORY_H_
