#include "compress/hidden_states.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.h"

namespace lacuna::compress {
namespace {

/// Makes the file with all of its bytes on the disk: a mapped page that the disk has no room for would end the program.
void reserve(const std::string& path, int64_t bytes) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) throw Error("{}: cannot create it: {}", path, std::strerror(errno));
  const int failed = ::posix_fallocate(fd, 0, off_t(bytes));
  ::close(fd);
  if (failed == 0) return;
  std::error_code ignored;
  std::filesystem::remove(path, ignored);
  throw Error(
      "{}: no room for {} bytes of hidden states: {}; leave --hidden-on-disk out, or give --work a folder on another "
      "disk",
      path, bytes, std::strerror(failed));
}

}  // namespace

void use_threads(int threads) {
  at::set_num_threads(threads);
  using Set = void (*)(int);
  if (const auto set = reinterpret_cast<Set>(::dlsym(RTLD_DEFAULT, "openblas_set_num_threads"))) set(threads);
}

HiddenStates::HiddenStates(const Net& net, std::span<const int32_t> ids, const Samples& samples,
                           const std::string& file)
    : device_(net.device()), file_(file) {
  const std::array<int64_t, 3> shape = {samples.count(), samples.seq_len, net.config().n_embd};
  const int64_t values = samples.tokens() * net.config().n_embd;
  if (!file.empty()) reserve(file, values * int64_t(sizeof(float)));
  states_ = file.empty() ? at::empty(shape, at::kFloat) : at::from_file(file, true, values, at::kFloat).view(shape);
  for (int64_t w = 0; w < samples.count(); ++w) {
    const auto window = ids.subspan(size_t(samples.first[size_t(w)]), size_t(samples.seq_len));
    const at::Tensor row = at::tensor(at::ArrayRef<int32_t>(window.data(), window.size()), at::kInt).to(at::kLong);
    states_[w].copy_(net.embed(row.unsqueeze(0))[0]);
  }
}

HiddenStates::~HiddenStates() {
  states_.reset();
  std::error_code ignored;
  if (!file_.empty()) std::filesystem::remove(file_, ignored);
}

void HiddenStates::set(int64_t w, const at::Tensor& hidden, int64_t layer) {
  if (!at::isfinite(hidden).all().item<bool>())
    throw Error(
        "layer {}, calibration window {}: the layer's result holds NaN or infinity; the model or the text is "
        "damaged, or the layer's compressed matrices are (try --inputs dense)",
        layer, w);
  states_[w].copy_(hidden[0]);
}

}  // namespace lacuna::compress
