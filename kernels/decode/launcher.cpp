// What Python calls of the launcher of the decoding kernels. Addresses are those of the tensors.
#include "decode/mlstm/params.h"
#include "decode/params.h"
#include "sequence/family_launcher.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher of_tokens{
        {runs<&run_decode>("decode"), tells<&decode_columns>("decode_columns"), runs<&run_mlstm>("mlstm")},
        {{"DECODE_TOKENS", kDecodeTokens},
         {"MAX_KEYS", kMlstmKeys},
         {"MAX_TOKENS", kMlstmTokens},
         {"MAX_SLICES", kMlstmSlices}}};
    static const Launcher launcher = joined({of_tokens});
    return &launcher;
}
