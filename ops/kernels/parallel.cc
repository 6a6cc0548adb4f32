#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace hop_tf {
namespace {

// At most so many processors' worth of time, rounded up, as containers limit it (version 2 of control groups).
int CoresOfQuota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota, period;
  if (!(file >> quota >> period) || quota <= 0 || period <= 0) return INT_MAX;  // "max" is no number.
  return static_cast<int>(std::ceil(quota / period));
}

int CountCores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = CPU_COUNT(&set);
#endif
  for (const char* name : {"TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"}) {
    const char* text = std::getenv(name);
    int limit = 0;  // As what is no number leaves it.
    if (text != nullptr) std::from_chars(text, text + std::strlen(text), limit);
    if (limit > 0) cores = std::min(cores, limit);
  }
  return std::max(std::min(cores, CoresOfQuota()), 1);
}

// Threads beside the calling one. All calls of a process together have no more than there are cores.
class Threads {
 public:
  explicit Threads(int most) { threads_.reserve(most); }
  ~Threads() { Join(); }

  // False if there are enough threads, or no more can be had.
  template <typename Function>
  bool Start(const Function& function, int argument) {
    if (running_.fetch_add(1) + 1 < NumCores()) {
      try {
        threads_.emplace_back(function, argument);
        return true;
      } catch (const std::system_error&) {
      } catch (const std::bad_alloc&) {
      }
    }
    running_.fetch_sub(1);
    return false;
  }

  void Join() {
    for (std::thread& thread : threads_) thread.join();
    running_.fetch_sub(static_cast<int>(threads_.size()));
    threads_.clear();
  }

 private:
  static inline std::atomic<int> running_{0};
  std::vector<std::thread> threads_;
};

}  // namespace

int NumCores() {
  static const int cores = CountCores();
  return cores;
}

int NumParts(int64_t num_items, int64_t min_items_per_part, int num_threads) {
  const int64_t most = num_threads > 0 ? num_threads : NumCores();
  return static_cast<int>(std::clamp<int64_t>(num_items / min_items_per_part, 1, most));
}

void ParallelFor(int64_t num_items, int num_parts, int64_t granularity,
                 const std::function<void(int part, int64_t begin, int64_t end)>& body) {
  const int64_t num_grains = (num_items + granularity - 1) / granularity;
  const auto boundary = [&](int part) { return std::min(num_grains * part / num_parts * granularity, num_items); };
  std::atomic<bool> lacks_memory{false};
  const auto run = [&](int part) {
    try {
      body(part, boundary(part), boundary(part + 1));
    } catch (const std::bad_alloc&) {
      lacks_memory = true;
    }
  };
  Threads threads(num_parts - 1);
  int part = 1;
  while (part < num_parts && threads.Start(run, part)) ++part;
  for (; part < num_parts; ++part) run(part);
  run(0);
  threads.Join();
  if (lacks_memory) throw std::bad_alloc();
}

}  // namespace hop_tf
